"""Events in the order in which they happened, however they arrive."""

from .events import KVEvent


class EventOrder:
    """Holds back the events of each instance until those before them have come.

    Args:
        max_waiting: events of one instance that are held back; with more of them the missing one
            is given up, and only a snapshot helps.
    """

    def __init__(self, max_waiting: int = 1024) -> None:
        self.max_waiting = max_waiting
        self._next: dict[int, int] = {}
        self._waiting: dict[int, dict[int, KVEvent]] = {}
        self._lost: set[int] = set()

    def is_lost(self, instance: int) -> bool:
        """Tell whether an event of ``instance`` was given up, and no snapshot has come since."""
        return instance in self._lost

    def take(self, event: KVEvent) -> list[KVEvent]:
        """Return the events that may be applied now that ``event`` has come, in their order."""
        instance = event.instance
        expected = self._next.get(instance, 0)
        if event.sequence < expected:
            return []
        waiting = self._waiting.setdefault(instance, {})
        if event.snapshot:
            self._lost.discard(instance)
            expected = event.sequence
            for sequence in [s for s in waiting if s < expected]:
                del waiting[sequence]
        waiting[event.sequence] = event
        ready = []
        while expected in waiting:
            ready.append(waiting.pop(expected))
            expected += 1
        self._next[instance] = expected
        if len(waiting) > self.max_waiting:
            waiting.clear()
            self._lost.add(instance)
        return ready
