"""Two things at once: each on a thread of its own, and on a GPU on a stream of its own."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

MAX_QUEUED = 2  # calls that the other side has queued on a GPU: it must stop promptly when told to


@dataclass
class Side:
    """One of the two.

    Attributes:
        call: what is repeated.
        count: how often, while it is timed.
        stream: the stream it is queued on; None on the CPU.
    """

    call: Callable[[], Any]
    count: int = 1
    stream: Any = None

    def context(self) -> AbstractContextManager:
        return torch.cuda.stream(self.stream) if self.stream else nullcontext()

    def finish(self) -> None:
        if self.stream:
            self.stream.synchronize()


def alone(side: Side) -> float:
    """Return the seconds of one call."""
    with side.context():
        start = time.perf_counter()
        for _ in range(side.count):
            side.call()
        side.finish()
        return (time.perf_counter() - start) / side.count


def overlapped(side: Side, other: Side) -> float:
    """Return the seconds of one call while the other side repeats its own."""
    started, stop = threading.Event(), threading.Event()
    errors: list[BaseException] = []

    def repeat() -> None:
        try:
            with other.context():
                keep_on(other, started, stop)
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            errors.append(error)
            started.set()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        started.wait()
        taken = alone(side)
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
    return taken


def keep_on(side: Side, started: threading.Event, stop: threading.Event) -> None:
    """Repeat the call until told to stop, never far ahead of the GPU."""
    queued = []
    while not stop.is_set():
        side.call()
        if side.stream:
            queued.append(side.stream.record_event())
            if len(queued) > MAX_QUEUED:
                queued.pop(0).synchronize()
        started.set()
    side.finish()


def calibrated(side: Side, wanted_s: float) -> Side:
    """Set the count so that it lasts about so long alone."""
    alone(side)
    side.count = max(1, round(wanted_s / alone(side)))
    return side
