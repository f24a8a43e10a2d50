"""FAST'25's workloads beside the conversation trace: the user's file of it, or one like it."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

from ..traces import TraceProfile, TraceRequest, synth_trace
from .made_up_toolagent import like_toolagent
from .outcome import Setup

# Made by TraceProfile.of from the released file, all of its 3,993 requests.
SYNTHETIC_PROFILE = Path(__file__).parent / "synthetic.profile.json"
NUM_SYNTHETIC = 3993
SYNTHETIC, TOOLAGENT = "synthetic", "toolagent"


def synthetic(setup: Setup) -> tuple[Sequence[TraceRequest], str]:
    """Return the synthetic workload, and what it is called."""
    if SYNTHETIC in setup.released:
        return setup.released[SYNTHETIC], "synthetic"
    return like_synthetic(setup.seed), "synthetic, made up by its profile"


def toolagent(setup: Setup) -> tuple[Sequence[TraceRequest], str]:
    """Return the tool&agent workload, and what it is called."""
    if TOOLAGENT in setup.released:
        return setup.released[TOOLAGENT], "tool&agent"
    return like_toolagent(setup.seed), "tool&agent, made up by its published figures"


def like_synthetic(seed: int) -> list[TraceRequest]:
    """Make up a trace like FAST'25's synthetic one."""
    return synth_trace(_profile(), NUM_SYNTHETIC, seed=seed)


@cache
def _profile() -> TraceProfile:
    return TraceProfile.load(SYNTHETIC_PROFILE)
