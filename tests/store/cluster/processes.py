"""Hosts in separate processes, which run functions on request and can be killed."""

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mooncake_serving.store import Store, directory

from .support import UNIT, Host, make_host

START_S = 60  # for a process that imports torch on a busy machine
ANSWER_S = 60


def serve(pipe: Connection, url: str, name: str, path: str | None, options: dict) -> None:
    """The main loop of a host: run functions until told to end."""
    store = None
    if path is not None:
        is_made = os.path.exists(path)
        store = Store.open(path) if is_made else Store.create(256 * UNIT, path, evict_ratio=0.0)
    with directory.connect(url) as servers:
        host = make_host(servers, name, store=store, **{"capacity_bytes": 256 * UNIT} | options)
        pipe.send(host.node.name)
        while (work := pipe.recv()) is not None:
            function, args = work
            try:
                pipe.send((True, function(host, *args)))
            except Exception as error:  # noqa: BLE001 - the parent raises it
                pipe.send((False, error))
        host.close()


class HostProcess:
    """A host in a process.

    Attributes:
        name: of its engine.
    """

    def __init__(self, url: str, name: str, path: Path | None = None, **options: Any):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve,
            args=(theirs, url, name, None if path is None else str(path), options),
            daemon=True,
        )
        self._process.start()
        theirs.close()
        assert self._pipe.poll(START_S), "the host did not start"
        self.name: str = self._pipe.recv()

    def begin(self, function: Callable[..., Any], *args: Any) -> None:
        """Have it call a function of a module with its ``Host``."""
        self._pipe.send((function, args))

    def end(self) -> Any:
        """Wait for the result."""
        assert self._pipe.poll(ANSWER_S), "the host does not answer"
        is_good, result = self._pipe.recv()
        if not is_good:
            raise result
        return result

    def do(self, function: Callable[..., Any], *args: Any) -> Any:
        self.begin(function, *args)
        return self.end()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGKILL)
        self._process.join()

    def stop(self) -> None:
        """Stop all its threads, until ``go_on``."""
        os.kill(self._process.pid, signal.SIGSTOP)
        tasks = list(Path(f"/proc/{self._process.pid}/task").iterdir())
        while not all(_is_stopped(task) for task in tasks):
            time.sleep(0.01)

    def go_on(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        """Have it close everything, unless it was killed."""
        if self._process.is_alive():
            self._pipe.send(None)
            self._process.join(ANSWER_S)
            assert self._process.exitcode == 0, "the host did not close"
        self._pipe.close()


def _is_stopped(task: Path) -> bool:
    return (task / "stat").read_text().rpartition(") ")[2].startswith("T")


@contextlib.contextmanager
def pool_file(name: str) -> Iterator[Path]:
    """A path for a pool, in memory."""
    path = Path("/dev/shm") / f"mk-test-{os.getpid()}-{name}"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


# What hosts are told to do.


def put(host: Host, key, value: bytes):
    return host.cluster.put(key, value)


def put_until_listed(host: Host, key, value: bytes) -> None:
    """Put it, but store nothing."""
    host.node._served.publisher = ListsAndWaits(host.node._served.publisher)
    host.cluster.put(key, value)


class ListsAndWaits:
    """A publisher whose caller does not get to store what it has listed."""

    reason = ""

    def __init__(self, publisher):
        self._publisher = publisher

    def publish(self, keys):
        assert self._publisher.publish(keys).all()
        time.sleep(ANSWER_S)


def get(host: Host, key) -> bytes | None:
    return host.cluster.get(key)


def fetch(host: Host, keys):
    return host.cluster.fetch(keys)
