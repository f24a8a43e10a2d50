"""The clock of a simulation: events in simulated time."""

import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from mooncake_serving.conductor import InvalidArgument


class Event:
    """A future event; ``cancel()`` prevents it."""

    __slots__ = ("action", "arguments")

    def __init__(self, action: Callable[..., None] | None, arguments: tuple[Any, ...]):
        self.action = action
        self.arguments = arguments

    def cancel(self) -> None:
        """Prevent the event. Cancelling twice, or after it happened, is not an error."""
        self.action = None


class Clock:
    """Calls functions in the order of their times; ties in the order of their requests.

    Example:
        >>> clock = Clock()
        >>> _ = clock.after(2.0, print, "two")
        >>> _ = clock.at(1.0, print, "one")
        >>> clock.run()
        one
        two
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.num_events = 0
        self._queue: list[tuple[float, int, Event]] = []
        self._order = count()

    def at(self, time: float, action: Callable[..., None], *arguments: Any) -> Event:
        """Call ``action(*arguments)`` at a time, which must not be in the past."""
        if not time >= self.now:
            raise InvalidArgument(f"at: time must be >= {self.now}, got {time}")
        event = Event(action, arguments)
        heapq.heappush(self._queue, (time, next(self._order), event))
        return event

    def after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> Event:
        """Call ``action(*arguments)`` this many seconds from now."""
        return self.at(self.now + seconds, action, *arguments)

    def run(self, until: float = float("inf")) -> None:
        """Process all events that are due up to a time, in order."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            time, _, event = heapq.heappop(queue)
            if event.action is not None:  # what is cancelled takes no time
                self.now = time
                self.num_events += 1
                event.action(*event.arguments)
        if until != float("inf"):
            self.now = until
