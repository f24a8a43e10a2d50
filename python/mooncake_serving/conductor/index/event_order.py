"""Events in the order in which they happened, however they arrive."""

from dataclasses import dataclass, field

from ..errors import check_count
from .events import KVEvent


@dataclass(slots=True)
class _Epoch:
    """The events of an instance since it was started, or was forgotten."""

    number: int
    expected: int = 0  # the first sequence that is neither applied nor part of a snapshot
    waiting: dict[int, KVEvent] = field(default_factory=dict)
    given_up: int = -1  # the last sequence that arrived and was not kept


class EventOrder:
    """Holds back the events of each instance until all earlier ones have arrived.

    Args:
        max_waiting_events: limit on the events of one instance that are held back; beyond it all
            are dropped, and must be sent again or be replaced by a snapshot.
    """

    def __init__(self, max_waiting_events: int = 1024) -> None:
        check_count("EventOrder", "max_waiting_events", max_waiting_events, 0)
        self.max_waiting_events = max_waiting_events
        self._epochs: dict[int, _Epoch] = {}

    def is_lost(self, instance: int) -> bool:
        """Whether events of ``instance`` are missing that will not arrive by themselves.

        They were dropped, or were sent before the first one that arrived here.
        """
        epoch = self._epochs.get(instance)
        if epoch is None:
            return False
        began_before = epoch.expected == 0 and bool(epoch.waiting)
        return began_before or epoch.expected <= epoch.given_up

    def forget(self, instance: int) -> None:
        """Expect the events of ``instance`` from 0 again; those of earlier epochs stay outdated."""
        if instance in self._epochs:
            self._epochs[instance] = _Epoch(self._epochs[instance].number)

    def take(self, event: KVEvent) -> list[KVEvent]:
        """Return the events that may be applied now that ``event`` has arrived, in order.

        If it has a later epoch than earlier events, the first is an empty snapshot.
        """
        ready: list[KVEvent] = []
        epoch = self._epochs.get(event.instance)
        if epoch is not None and event.epoch > epoch.number:
            ready.append(KVEvent(event.instance, 0, snapshot=True, epoch=event.epoch))
            epoch = None
        if epoch is None:
            epoch = self._epochs[event.instance] = _Epoch(event.epoch)
        if event.epoch < epoch.number or event.sequence < epoch.expected:
            return ready
        waiting = epoch.waiting
        if event.snapshot:
            epoch.expected = event.sequence
            for sequence in [s for s in waiting if s < event.sequence]:
                del waiting[sequence]
        waiting[event.sequence] = event
        while epoch.expected in waiting:
            ready.append(waiting.pop(epoch.expected))
            epoch.expected += 1
        if len(waiting) > self.max_waiting_events:
            epoch.given_up = max(epoch.given_up, *waiting)
            waiting.clear()
        return ready
