"""Which objects are on their way between the tiers just now: one thread at a time moves each."""

import contextlib
import threading
from collections.abc import Iterable, Iterator

from mooncake_kernels.pool import Key


class Moves:
    """Keys that threads hold: who brings an object up, and who removes it, wait for each other."""

    def __init__(self) -> None:
        self._held: set[Key] = set()
        self._all_held = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, keys: Iterable[Key]) -> Iterator[None]:
        """Wait until nobody holds any of the keys, and hold them: all at once, so none waits
        for another in a circle."""
        wanted = set(keys)
        with self._changed:
            self._changed.wait_for(lambda: not self._all_held and self._held.isdisjoint(wanted))
            self._held |= wanted
        try:
            yield
        finally:
            with self._changed:
                self._held -= wanted
                self._changed.notify_all()

    @contextlib.contextmanager
    def hold_all(self) -> Iterator[None]:
        """Do the same with all keys that there are."""
        with self._changed:
            self._changed.wait_for(lambda: not self._all_held)
            self._all_held = True  # from now on nobody else begins
            self._changed.wait_for(lambda: not self._held)
        try:
            yield
        finally:
            with self._changed:
                self._all_held = False
                self._changed.notify_all()
