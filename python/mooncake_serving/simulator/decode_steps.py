"""Decode steps in which nobody joins or leaves, as one event of the clock."""

from abc import ABC, abstractmethod

from .events import Clock, Event
from .running_batch import steps_by, steps_s


class DecodeSteps(ABC):
    """What instances that decode share: steps planned ahead, and cut when somebody joins.

    The first of them takes ``_first_s`` from ``_started`` on, and each one ``_growth_s`` longer
    than the one before it.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._event: Event | None = None
        self._planned = 0  # steps until the event
        self._started = self._first_s = self._growth_s = 0.0

    def _plan(self, steps: int) -> None:
        self._planned = steps
        end = self._started + steps_s(steps, self._first_s, self._growth_s)
        self._event = self._clock.at(max(end, self._clock.now), self._end_decodes)

    def _cut(self) -> None:
        """End with the step under way, so that somebody can join."""
        elapsed = self._clock.now - self._started
        steps = steps_by(elapsed, self._first_s, self._growth_s)
        if steps < self._planned:
            assert self._event is not None
            self._event.cancel()
            self._plan(steps)

    @abstractmethod
    def _end_decodes(self) -> None:
        """Pass the steps that were planned."""
