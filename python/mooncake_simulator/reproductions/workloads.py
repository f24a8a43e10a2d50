"""FAST'25's workloads: the user's file of each, or for two of them a synthetic substitute."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..traces import TraceProfile, TraceRequest, synth_trace
from . import made_up_toolagent
from .made_up_toolagent import like_toolagent
from .outcome import Setup

# Made by TraceProfile.of from the released file, all of its 3,993 requests.
SYNTHETIC_PROFILE = Path(__file__).parent / "synthetic.profile.json"
CONVERSATION, SYNTHETIC, TOOLAGENT = "conversation", "synthetic", "toolagent"
NUM_REQUESTS = {  # FAST'25, Table 2
    CONVERSATION: 12_031,
    SYNTHETIC: 3_993,
    TOOLAGENT: made_up_toolagent.NUM_REQUESTS,
}


@dataclass(frozen=True)
class Workload:
    """Requests in the order of time, and their name.

    ``kind`` is the workload whose published figures they are compared with.
    """

    kind: str
    trace: Sequence[TraceRequest]
    name: str

    @property
    def remarks(self) -> list[str]:
        """Remarks for requests that cannot be those of the published figures."""
        published = NUM_REQUESTS[self.kind]
        if len(self.trace) == published:
            return []
        return [
            f"the published figures are of FAST'25's {self.kind} trace of {published:,} requests, "
            f"ours are of {len(self.trace):,}: {self.name}"
        ]


def conversation(setup: Setup) -> Workload:
    """Return the user's conversation workload."""
    return Workload(CONVERSATION, setup.trace, setup.trace_name)


def synthetic(setup: Setup) -> Workload:
    """Return the synthetic workload."""
    if SYNTHETIC in setup.released:
        return Workload(SYNTHETIC, setup.released[SYNTHETIC], "synthetic")
    return Workload(SYNTHETIC, like_synthetic(setup.seed), "synthetic, made up by its profile")


def toolagent(setup: Setup) -> Workload:
    """Return the tool&agent workload."""
    if TOOLAGENT in setup.released:
        return Workload(TOOLAGENT, setup.released[TOOLAGENT], "tool&agent")
    made_up = like_toolagent(setup.seed)
    return Workload(TOOLAGENT, made_up, "tool&agent, made up by its published figures")


def like_synthetic(seed: int) -> list[TraceRequest]:
    """Generate a trace like FAST'25's synthetic one."""
    return synth_trace(_profile(), NUM_REQUESTS[SYNTHETIC], seed=seed)


@cache
def _profile() -> TraceProfile:
    return TraceProfile.load(SYNTHETIC_PROFILE)
