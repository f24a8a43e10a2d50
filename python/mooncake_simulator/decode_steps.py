"""Decode steps during which no job joins or leaves, as one event of the clock."""

from abc import ABC, abstractmethod

from .events import Clock, Event
from .running_batch import steps_by, steps_s


class DecodeSteps(ABC):
    """The common part of decoding instances: steps planned ahead, and cut when a job joins.

    The first step takes ``_first_s`` from ``_started`` on, and each one ``_growth_s`` longer than
    the one before it.
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
        """End with the current step, so that a job can join."""
        elapsed = self._clock.now - self._started
        steps = steps_by(elapsed, self._first_s, self._growth_s)
        if steps < self._planned:
            assert self._event is not None
            self._event.cancel()
            self._plan(steps)

    @abstractmethod
    def _end_decodes(self) -> None:
        """Complete the planned steps."""
