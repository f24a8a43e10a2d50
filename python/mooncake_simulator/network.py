"""NICs with contention: transfers share them."""

from collections.abc import Callable
from math import inf

from mooncake_serving.conductor import InvalidArgument

from .events import Clock, Event


class Flow:
    """Bytes in flight from one NIC to another."""

    __slots__ = (
        "_event",
        "_rate",
        "_updated",
        "done",
        "dst",
        "limit_bytes_per_s",
        "lost",
        "remaining",
        "src",
    )

    def __init__(
        self,
        src: "Nic",
        dst: "Nic",
        num_bytes: float,
        done: Callable[[], None],
        lost: Callable[[], None],
        limit_bytes_per_s: float,
    ):
        self.src = src
        self.dst = dst
        self.remaining = num_bytes
        self.limit_bytes_per_s = limit_bytes_per_s
        self.done = done
        self.lost = lost
        self._rate = 0.0
        self._updated = 0.0
        self._event: Event | None = None

    @property
    def ends_s(self) -> float:
        """When its last byte will be there, at its present rate."""
        return self._updated + (self.remaining / self._rate if self._rate else 0.0)


class Nic:
    """The network of one machine, in both directions.

    Args:
        bytes_per_s: in each direction, all its cards together.
    """

    __slots__ = ("bytes_per_s", "inbound", "outbound", "received_bytes", "sent_bytes")

    def __init__(self, bytes_per_s: float):
        if not bytes_per_s > 0:
            raise InvalidArgument(f"Nic: bytes_per_s must be > 0, got {bytes_per_s!r}")
        self.bytes_per_s = bytes_per_s
        self.outbound: dict[Flow, None] = {}  # an ordered set: runs are reproducible
        self.inbound: dict[Flow, None] = {}
        self.sent_bytes = 0.0
        self.received_bytes = 0.0


class Network:
    """Moves bytes between NICs; each NIC shares its rate equally among its flows.

    rate(flow) = min(src.bytes_per_s / flows out of src, dst.bytes_per_s / flows into dst,
                     what it is read from)

    What a flow that is limited elsewhere leaves unused is not given to others, so this is slightly
    below max-min fairness, and never above it. The switches between are non-blocking.
    """

    def __init__(self, clock: Clock):
        self._clock = clock

    def send(
        self,
        src: Nic,
        dst: Nic,
        num_bytes: float,
        done: Callable[[], None],
        lost: Callable[[], None] = lambda: None,
        *,
        limit_bytes_per_s: float = inf,
    ) -> Flow:
        """Move bytes and call ``done`` when the last one is there; within a machine at once.

        ``lost`` is called instead if one of the machines fails before. Data from a disk is sent as
        it is read, at ``limit_bytes_per_s`` at most.
        """
        flow = Flow(src, dst, num_bytes, done, lost, limit_bytes_per_s)
        if src is dst or num_bytes <= 0:
            flow._event = self._clock.after(0.0, done)
            return flow
        flow._updated = self._clock.now
        src.outbound[flow] = None
        dst.inbound[flow] = None
        self._share(src, dst)
        return flow

    def cancel(self, flow: Flow) -> None:
        """Stop a flow, if it is in flight; neither ``done`` nor ``lost`` is called."""
        if flow._event is not None:
            flow._event.cancel()
        if flow in flow.src.outbound:
            self._advance(flow)
            self._remove(flow)

    def fail(self, nic: Nic) -> None:
        """Stop all flows of a failed machine."""
        flows = [*nic.outbound, *nic.inbound]
        for flow in flows:
            self.cancel(flow)
        for flow in flows:
            flow.lost()

    def _share(self, src: Nic, dst: Nic) -> None:
        """Update the rates of these NICs' flows after some have come or gone."""
        for flow in {**src.outbound, **dst.inbound}:
            sender, receiver = flow.src, flow.dst
            rate = min(
                sender.bytes_per_s / len(sender.outbound),
                receiver.bytes_per_s / len(receiver.inbound),
                flow.limit_bytes_per_s,
            )
            if rate != flow._rate:
                self._advance(flow)
                flow._rate = rate
                if flow._event is not None:
                    flow._event.cancel()
                flow._event = self._clock.after(flow.remaining / rate, self._finish, flow)

    def _advance(self, flow: Flow) -> None:
        now = self._clock.now
        moved = min(flow.remaining, (now - flow._updated) * flow._rate)
        flow.remaining -= moved
        flow._updated = now
        flow.src.sent_bytes += moved
        flow.dst.received_bytes += moved

    def _finish(self, flow: Flow) -> None:
        flow.src.sent_bytes += flow.remaining  # the remainder of rounding
        flow.dst.received_bytes += flow.remaining
        flow.remaining = 0.0
        self._remove(flow)
        flow.done()

    def _remove(self, flow: Flow) -> None:
        if flow._event is not None:
            flow._event.cancel()
        del flow.src.outbound[flow]
        del flow.dst.inbound[flow]
        self._share(flow.src, flow.dst)
