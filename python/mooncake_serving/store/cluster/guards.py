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
