"""How two engines hand requests over: the settings of either side."""

from collections.abc import Sequence
from dataclasses import dataclass

from mooncake_serving.arguments import as_count, as_seconds, refuse


@dataclass(frozen=True)
class HandoffSettings:
    """The settings by name.

    Attributes:
        slot_bytes: of a staging slot, and so of the largest chunk: one write.
        num_slots: of a sender, each with a thread that packs and writes; and of a receiver, for all
            its requests.
        lease_s: how long blocks of a finished prefill wait to be asked for; and how long a receiver
            that comes first waits until the transfer is offered.
        silence_s: after which a peer that says nothing is given up. A request whose peer does say
            something, but sends no chunk or grants no slot for one, is given up after the longer of
            ``lease_s`` and this.
        deadline_s: of a connection, and of one write.
        require_rdma: whether a peer on another machine is refused that only tcp leads to.
        model: name of the model; engines that name different ones refuse each other. "": none.
    """

    slot_bytes: int = 32 << 20
    num_slots: int = 4
    lease_s: float = 60.0
    silence_s: float = 15.0
    deadline_s: float = 10.0
    require_rdma: bool = False
    model: str = ""

    def __post_init__(self) -> None:
        """Check the types and ranges.

        Raises:
            InvalidArgument: a setting is wrong; the message names it.
        """
        op = "HandoffSettings"
        as_count(op, "slot_bytes", self.slot_bytes, 1)
        as_count(op, "num_slots", self.num_slots, 1)
        for name in ("lease_s", "silence_s", "deadline_s"):
            as_seconds(op, name, getattr(self, name))
        if not isinstance(self.require_rdma, bool):
            refuse(op, "require_rdma", "a bool", self.require_rdma)
        if not isinstance(self.model, str) or len(self.model) > 512:
            refuse(op, "model", "a string of at most 512 characters", self.model)

    @property
    def stall_s(self) -> float:
        """After which a request is given up that makes no progress."""
        return max(self.lease_s, self.silence_s)


@dataclass(frozen=True)
class Source:
    """A sending engine.

    Attributes:
        engine_id: its id; "": any engine that is there.
        ranks: the transfer engine's name of each of its ranks, in order; empty: its first rank is
            asked for them.
        first_rank: name of the first rank's transfer engine, "host:port"; only without ``ranks``.
    """

    engine_id: str = ""
    ranks: Sequence[str] = ()
    first_rank: str = ""
