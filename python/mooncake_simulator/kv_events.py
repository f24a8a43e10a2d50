"""Reports a node's store to the conductor's index, as engines do: by events, possibly delayed."""

from collections.abc import Sequence

from mooncake_serving.conductor import Index, KVEvent

from .caches import Key
from .events import Clock


class Publisher:
    """Numbers the changes of one instance's store and has the index apply them after a delay.

    Args:
        clock: the simulation's.
        index: of the conductor.
        instance: its number there.
        delay_s: delay from a change until the index knows of it.
    """

    def __init__(self, clock: Clock, index: Index, instance: int, delay_s: float = 0.0):
        self._clock = clock
        self._index = index
        self._instance = instance
        self._delay_s = delay_s
        self._sequence = 0

    def stored(self, keys: Sequence[Key]) -> None:
        """Report that a prompt's blocks, from its first, are in the store."""
        self._publish(stored=(tuple(keys),))

    def removed(self, keys: Sequence[Key]) -> None:
        """Report that blocks have left the store."""
        self._publish(removed=tuple(keys))

    def lost_all(self) -> None:
        """Report that the store is empty after a failure: known at once, without any delay."""
        self._apply(KVEvent(self._instance, self._take_number(), snapshot=True))

    def _publish(
        self, stored: tuple[tuple[Key, ...], ...] = (), removed: tuple[Key, ...] = ()
    ) -> None:
        event = KVEvent(self._instance, self._take_number(), stored, removed)  # type: ignore[arg-type]
        if self._delay_s:
            self._clock.after(self._delay_s, self._apply, event)
        else:
            self._apply(event)

    def _apply(self, event: KVEvent) -> None:
        self._index.apply(event)

    def _take_number(self) -> int:
        self._sequence += 1
        return self._sequence - 1
