"""Calls that run at the same time."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

START_S = 60.0


def in_threads(*calls: Callable[[], object]) -> list:
    """The results of calls that begin together, each in a thread of its own.

    All have ended when this returns; what one of them raises is raised here.
    """
    together = threading.Barrier(len(calls))

    def run(call):
        together.wait(START_S)
        return call()

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
