"""Changes that wait to be published: bounded, and never waited for."""

import os
import threading
from collections import deque
from typing import Generic, TypeVar

Change = TypeVar("Change")


class ChangeQueue(Generic[Change]):
    """A queue into which any thread puts, and from which one thread takes.

    Args:
        capacity: changes that can wait. Beyond it they are dropped, and who takes finds None in the
            place of those that were.

    Attributes:
        wake_fd: readable when there may be something to take, or the queue was closed.
        is_closed: whether ``close`` was called.
        num_dropped: changes that were dropped.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._lock = threading.Lock()
        self._changes: deque[Change | None] = deque()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_closed = False
        self.num_dropped = 0

    def put(self, change: Change) -> None:
        """Append; drop it if there is no room, and pass it over after the end."""
        with self._lock:
            if self.is_closed:
                return
            if len(self._changes) < self._capacity:
                self._changes.append(change)
            else:
                self.num_dropped += 1
                if self._changes[-1] is not None:
                    self._changes.append(None)
            if len(self._changes) == 1:
                os.eventfd_write(self.wake_fd, 1)

    def take(self, max_changes: int) -> list[Change | None]:
        """Take the oldest, at most so many."""
        with self._lock:
            count = min(len(self._changes), max_changes)
            return [self._changes.popleft() for _ in range(count)]

    def clear_wake(self) -> None:
        """Be readable only for what comes from now on; take after this."""
        os.eventfd_read(self.wake_fd)

    def close(self) -> bool:
        """Take no more, and wake who takes; returns whether this was the first call."""
        with self._lock:
            is_first = not self.is_closed
            if is_first:
                self.is_closed = True
                os.eventfd_write(self.wake_fd, 1)
            return is_first

    def destroy(self) -> None:
        """Give the descriptor back: by who takes, after ``close``."""
        with self._lock:
            os.close(self.wake_fd)
