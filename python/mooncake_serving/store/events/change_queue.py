"""A bounded queue of changes to be published, which producers never wait for."""

import os
import threading
from collections import deque
from typing import Generic, TypeVar

Change = TypeVar("Change")


class ChangeQueue(Generic[Change]):
    """A queue into which any thread puts, and from which one thread takes.

    Args:
        capacity: changes that can be queued. Beyond it they are dropped, and the consumer finds
            None in their place.

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

    def put(self, *changes: Change) -> None:
        """Append changes, with no other between them; drop what there is no room for, and ignore
        them after ``close``.
        """
        with self._lock:
            if self.is_closed:
                return
            was_empty = not self._changes
            for change in changes:
                if len(self._changes) < self._capacity:
                    self._changes.append(change)
                else:
                    self.num_dropped += 1
                    if self._changes[-1] is not None:
                        self._changes.append(None)
            if was_empty:
                os.eventfd_write(self.wake_fd, 1)

    def take(self, max_changes: int) -> list[Change | None]:
        """Take the oldest changes, at most this many."""
        with self._lock:
            count = min(len(self._changes), max_changes)
            return [self._changes.popleft() for _ in range(count)]

    def clear_wake(self) -> None:
        """Reset ``wake_fd`` until the next change; take after this."""
        os.eventfd_read(self.wake_fd)

    def close(self) -> bool:
        """Accept no more, and wake the consumer; returns whether this was the first call."""
        with self._lock:
            is_first = not self.is_closed
            if is_first:
                self.is_closed = True
                os.eventfd_write(self.wake_fd, 1)
            return is_first

    def destroy(self) -> None:
        """Close the descriptor: called by the consumer, after ``close``."""
        with self._lock:
            os.close(self.wake_fd)
