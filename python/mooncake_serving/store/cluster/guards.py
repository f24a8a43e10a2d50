"""Blocks of code that others can see are running. Ctrl-C at any moment leaves none behind.

A guard is a lock of its own, because Python enters and leaves a lock's ``with`` block in one step
each. A context manager written in Python can be interrupted after it has noted that the block
begins, or before it notes the end.
"""

import threading
import weakref

Guard = threading.Lock  # locked while the block runs


class Guards:
    """Guards that are in use. Thread-safe."""

    def __init__(self) -> None:
        self._guards: set[weakref.ref] = set()

    def new(self) -> Guard:
        """Return one for a ``with`` block."""
        guard = Guard()
        self._guards.add(weakref.ref(guard, self._guards.discard))
        return guard

    def any(self) -> bool:
        """Whether any such block is running."""
        # Unlike tuple() and the like, copy() cannot be interrupted by the collection of a guard.
        return any(map(is_active, self._guards.copy()))


def is_active(guard: "weakref.ref[Guard]") -> bool:
    """Whether the block runs."""
    alive = guard()
    return alive is not None and alive.locked()


class Admission:
    """A gate to a pool, for this node's callers and for requests of others. Thread-safe::

        with admission.enter():
            if admission.is_open:
                ...  # put objects

    To drain the pool, close the gate and wait until those inside are done: then the only new
    objects are those of processes without a node.

    Attributes:
        is_open: whether those who have entered may put objects.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._inside = Guards()

    def set_open(self, is_open: bool) -> None:
        """Open or close it; those inside stay."""
        self.is_open = is_open

    @property
    def is_used(self) -> bool:
        """Whether anyone is inside."""
        return self._inside.any()

    def enter(self) -> Guard:
        """Enter for the duration of a ``with`` block, then look whether it is open."""
        return self._inside.new()
