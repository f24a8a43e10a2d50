"""Processes of a bench: new ones that find torch imported, what others compute, and where."""

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Collection, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")  # of a processor's clock


def new_processes() -> ForkServerContext:
    """Processes of a server that has imported the package, and has no other thread."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mooncake_kernels"])
    return context


def free_port() -> int:
    """A port of the loopback that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def family(pid: int) -> Iterator[int]:
    """Yield a process and all that it and its descendants have started, as far as they run."""
    yield pid
    with contextlib.suppress(OSError):  # it has ended meanwhile
        for file in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in file.read_text().split():
                yield from family(int(child))


def cpu_seconds(pid: int) -> float:
    """What a process and those that it has started have computed so far."""
    total = 0.0
    for one in family(pid):
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            total += (int(fields[11]) + int(fields[12])) * TICK_S
    return total


def pin(pid: int, cores: Collection[int]) -> None:
    """Have a process, those that it has started, and all of their threads run on these cores."""
    for one in family(pid):
        for thread in Path(f"/proc/{one}/task").glob("*"):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(int(thread.name), cores)
