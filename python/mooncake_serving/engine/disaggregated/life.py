"""The life of a KV block: what each step of it moved, and how long that took."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# step: what happens to a block in it. In the order of a block's life.
STEPS = {
    "registered": "its pools, once: peers may write to them",
    "written": "FREE -> READY, a prefill chunk fills it",
    "named": "READY, hash of its tokens and its parent's name",
    "gathered": "READY -> IN FLIGHT, into one packed buffer",
    "moved": "IN FLIGHT, prefill process to decode process",
    "scattered": "IN FLIGHT -> READY, into the decode process's layout",
    "attended": "READY -> FREE, read by every token that follows",
}


@dataclass(frozen=True)
class Step:
    """One step of some blocks' lives."""

    name: str  # a key of STEPS
    num_bytes: int
    seconds: float


class Life:
    """Sums of steps, by name."""

    def __init__(self, steps: list[Step] | None = None):
        self._sums: dict[str, tuple[int, float]] = {}
        for step in steps or []:
            self.add(step)

    def add(self, step: Step) -> None:
        """Count one step in."""
        num_bytes, seconds = self._sums.get(step.name, (0, 0.0))
        self._sums[step.name] = (num_bytes + step.num_bytes, seconds + step.seconds)

    def rows(self) -> Iterator[Step]:
        """Iterate over the sums in the order of a block's life."""
        for name in STEPS:
            if name in self._sums:
                yield Step(name, *self._sums[name])


@contextmanager
def timed(report: Callable[[Step], None], name: str, num_bytes: int) -> Iterator[None]:
    """Report a step that takes as long as the ``with`` block."""
    began = time.perf_counter()
    yield
    report(Step(name, num_bytes, time.perf_counter() - began))
