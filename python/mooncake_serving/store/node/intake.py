"""Whether a node's pool takes new objects, and who is just putting some into it."""

import contextlib
import threading
from collections.abc import Iterator


class Intake:
    """A door to a pool, for this node's callers and for what others ask of it. Thread-safe.

    Who drains the pool shuts it, and waits until those are done who came in before: then nothing
    comes any more, but what processes without a node put.

    Attributes:
        is_open: whether anybody is let in.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._num_inside = 0
        self._lock = threading.Lock()

    def let_in(self, is_open: bool) -> None:
        """Open or shut it; who is inside stays."""
        with self._lock:
            self.is_open = is_open

    @property
    def is_used(self) -> bool:
        """Whether somebody is inside."""
        with self._lock:
            return self._num_inside > 0

    @contextlib.contextmanager
    def enter(self) -> Iterator[bool]:
        """Go in for as long as this lasts; False: it is shut."""
        with self._lock:
            is_in = self.is_open
            self._num_inside += is_in
        try:
            yield is_in
        finally:
            with self._lock:
                self._num_inside -= is_in
