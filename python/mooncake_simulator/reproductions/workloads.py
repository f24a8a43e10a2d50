"""FAST'25's workloads: the user's file of each, or for two of them a synthetic substitute."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_serving.conductor import InvalidArgument

from ..traces import TraceRequest, synth_trace
from . import made_up_toolagent
from .made_up_toolagent import like_toolagent
from .outcome import Setup

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
    """Return the synthetic workload.

    Raises:
        InvalidArgument: the setup has neither the released trace nor a profile of it.
    """
    if SYNTHETIC in setup.released:
        return Workload(SYNTHETIC, setup.released[SYNTHETIC], "synthetic")
    if setup.synthetic_profile is None:
        raise InvalidArgument("synthetic: setup must have that trace or its profile, got neither")
    made_up = synth_trace(setup.synthetic_profile, NUM_REQUESTS[SYNTHETIC], seed=setup.seed)
    return Workload(SYNTHETIC, made_up, "synthetic, made up by its profile")


def toolagent(setup: Setup) -> Workload:
    """Return the tool&agent workload."""
    if TOOLAGENT in setup.released:
        return Workload(TOOLAGENT, setup.released[TOOLAGENT], "tool&agent")
    made_up = like_toolagent(setup.seed)
    return Workload(TOOLAGENT, made_up, "tool&agent, made up by its published figures")
