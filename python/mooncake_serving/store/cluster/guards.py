"""Blocks of code that others can see are running. Ctrl-C at any moment leaves none behind.

A hold is a lock of its own, because Python enters and leaves a lock's ``with`` block in one step
each. A context manager written in Python can be interrupted after it has noted that the block
begins, or before it notes the end.
"""

import threading
import weakref

Hold = threading.Lock  # locked while the block runs


class Holds:
    """Holds that are in use. Thread-safe."""

    def __init__(self) -> None:
        self._holds: set[weakref.ref] = set()

    def new(self) -> Hold:
        """Return one for a ``with`` block."""
        hold = Hold()
        self._holds.add(weakref.ref(hold, self._holds.discard))
        return hold

    def any(self) -> bool:
        """Whether any such block is running."""
        # Unlike tuple() and the like, copy() cannot be interrupted by the collection of a hold.
        return any(map(is_held, self._holds.copy()))


def is_held(hold: "weakref.ref[Hold]") -> bool:
    """Whether the block runs."""
    alive = hold()
    return alive is not None and alive.locked()
