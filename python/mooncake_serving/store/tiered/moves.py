"""Which objects are moving between the tiers just now: one thread at a time moves each."""

import contextlib
import threading
from collections.abc import Iterable, Iterator

from mooncake_kernels.pool import Key


class Moves:
    """Keys held by threads: a promotion and a removal of one object wait for each other.

    A wait may be interrupted, by Ctrl-C for example; then nothing is held.
    """

    def __init__(self) -> None:
        self._held: dict[object, set[Key]] = {}  # by holder
        self._all_held_by: object | None = None
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, keys: Iterable[Key]) -> Iterator[None]:
        """Wait until none of the keys is held, and hold all at once, so that none can deadlock."""
        wanted, holder = set(keys), object()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._are_free(wanted))
                self._held[holder] = wanted
            yield
        finally:
            with self._changed:
                self._held.pop(holder, None)
                self._changed.notify_all()

    @contextlib.contextmanager
    def hold_all(self) -> Iterator[None]:
        """Do the same with all keys."""
        holder = object()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._all_held_by is None)
                self._all_held_by = holder  # from now on no other holder begins
                self._changed.wait_for(lambda: not self._held)
            yield
        finally:
            with self._changed:
                if self._all_held_by is holder:
                    self._all_held_by = None
                self._changed.notify_all()

    def _are_free(self, keys: set[Key]) -> bool:
        return self._all_held_by is None and all(map(keys.isdisjoint, self._held.values()))
