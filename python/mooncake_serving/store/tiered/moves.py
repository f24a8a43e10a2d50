"""Which objects are moving between the tiers just now: one thread at a time moves each."""

import contextlib
import threading
from collections.abc import Iterable, Iterator

from mooncake_kernels.pool import Key


class Moves:
    """Keys held by threads: a promotion and a removal of one object wait for each other."""

    def __init__(self) -> None:
        self._held: set[Key] = set()
        self._all_held = False
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, keys: Iterable[Key]) -> Iterator[None]:
        """Wait until none of the keys is held, and hold all at once, so that none can deadlock."""
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
        """Do the same with all keys."""
        with self._changed:
            self._changed.wait_for(lambda: not self._all_held)
            self._all_held = True  # from now on no other holder begins
            self._changed.wait_for(lambda: not self._held)
        try:
            yield
        finally:
            with self._changed:
                self._all_held = False
                self._changed.notify_all()
