"""Shared by the tests of the compat packages: hashed memory, an engine, one in another process."""

import concurrent.futures
import contextlib
import logging
import multiprocessing
import os
import re
import signal
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_serving.compat.mooncake import TransferEngine

from ..stopping import stop
from ..transfer.support import UNTOUCHED as UNTOUCHED
from ..transfer.support import addressed as addressed
from ..transfer.support import untouched
from ..waiting import WAIT_S, eventually

SIZE = 1 << 20


def start(engine: TransferEngine, hostname: str = "127.0.0.1") -> TransferEngine:
    assert engine.initialize(hostname, "P2PHANDSHAKE", "tcp", "") == 0
    return engine


@dataclass
class Side:
    """An engine and its registered memory."""

    engine: TransferEngine
    memory: np.ndarray

    @property
    def port(self) -> int:
        return self.engine.get_rpc_port()

    @property
    def address(self) -> int:
        return self.memory.ctypes.data

    def sees(self, expected: np.ndarray) -> None:
        np.testing.assert_array_equal(self.memory, expected)


@contextlib.contextmanager
def side(memory: np.ndarray, hostname: str = "127.0.0.1"):
    with contextlib.closing(start(TransferEngine(), hostname)) as engine:
        assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
        yield Side(engine, memory)


@dataclass
class Process:
    """An engine in a separate process, whose calls are made from here."""

    process: multiprocessing.Process
    pipe: Any
    port: int
    address: int

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    def call(self, method: str, *arguments):
        self.pipe.send((method, arguments))
        assert self.pipe.poll(WAIT_S), f"no answer to {method}"
        return self.pipe.recv()

    def read(self, num_bytes: int = SIZE) -> np.ndarray:
        return np.frombuffer(self.call("read_bytes_from_buffer", self.address, num_bytes), np.uint8)

    def sees(self, expected: np.ndarray) -> None:
        np.testing.assert_array_equal(self.read(expected.nbytes), expected)

    def stop(self) -> None:
        """Stop it, and wait until each of its threads has stopped."""
        stop(self.process.pid)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(WAIT_S)


def serve(pipe, hostname: str, num_bytes: int) -> None:
    """The main loop of the other process: offer memory, and make the requested calls."""
    engine = start(TransferEngine(), hostname)
    memory = untouched(num_bytes)
    assert engine.register_memory(memory.ctypes.data, num_bytes) == 0
    pipe.send((engine.get_rpc_port(), memory.ctypes.data))
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = pipe.recv()
            pipe.send(getattr(engine, method)(*arguments))


def checked(engine: TransferEngine, batch_id: int) -> int:
    """What transfer_check_status says in the end."""
    seen: list[int] = []
    eventually(lambda: seen.append(engine.transfer_check_status(batch_id)) or seen[-1] != 0)
    return seen[-1]


@contextlib.contextmanager
def other_process(hostname: str = "127.0.0.1", num_bytes: int = SIZE):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs, hostname, num_bytes), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(WAIT_S), "the other process did not start"
        other = Process(process, ours, *ours.recv())
        yield other
    finally:
        Process(process, ours, 0, 0).kill()
        ours.close()


def refused(caplog, code: int, reason: str, call, *arguments, **named) -> None:
    """The call returns the code, and logs one error with the reason."""
    caplog.clear()
    assert call(*arguments, **named) == code
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1, caplog.text
    assert errors[0].name == "mooncake_serving.compat.mooncake"
    message = errors[0].getMessage()
    assert message.startswith(f"{call.__name__}: "), message
    assert re.search(reason, message), message


def in_threads(count: int, run) -> list:
    """The results of ``run(index)`` in threads that start together."""
    ready = threading.Barrier(count)

    def after_all(index: int):
        ready.wait(WAIT_S)
        return run(index)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(after_all, range(count), timeout=WAIT_S))
