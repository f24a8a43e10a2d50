"""Whether a node's pool accepts new objects, and whether any are being put into it."""

import contextlib
import threading
from collections.abc import Iterator


class Intake:
    """A gate to a pool, for this node's callers and for requests of others. Thread-safe.

    To drain the pool, close the gate and wait until those inside are done: then the only new
    objects are those of processes without a node.

    Attributes:
        is_open: whether anyone may enter.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._num_inside = 0
        self._lock = threading.Lock()

    def let_in(self, is_open: bool) -> None:
        """Open or close it; those inside stay."""
        with self._lock:
            self.is_open = is_open

    @property
    def is_used(self) -> bool:
        """Whether anyone is inside."""
        with self._lock:
            return self._num_inside > 0

    @contextlib.contextmanager
    def enter(self) -> Iterator[bool]:
        """Enter for the duration of the ``with`` block; False: it is closed."""
        with self._lock:
            is_in = self.is_open
            self._num_inside += is_in
        try:
            yield is_in
        finally:
            with self._lock:
                self._num_inside -= is_in
