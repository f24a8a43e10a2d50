"""A store in a separate process, whose calls are made from the test."""

import contextlib
import multiprocessing
import os
import signal
from typing import Any

import numpy as np

from mooncake_serving.compat.mooncake.store import MooncakeDistributedStore

from .support import WAIT_S


def serve(pipe, settings: dict, num_bytes: int, environment: dict[str, str]) -> None:
    """Set up a store and memory, and make the requested calls."""
    os.environ.update(environment)
    store = MooncakeDistributedStore()
    memory = np.zeros(num_bytes, np.uint8)
    pipe.send((store.setup(settings), memory.ctypes.data))
    with contextlib.suppress(EOFError):
        while True:
            name, arguments = pipe.recv()
            if name == "write":
                memory[: len(arguments[0])] = np.frombuffer(arguments[0], np.uint8)
                pipe.send(None)
            elif name == "read":
                pipe.send(memory[: arguments[0]].tobytes())
            else:
                pipe.send(getattr(store, name)(*arguments))


class Process:
    """Its calls are those of the store; ``write`` and ``read`` access its memory."""

    def __init__(
        self, settings: dict, environment: dict[str, str] | None = None, num_bytes: int = 1 << 20
    ):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, settings, num_bytes, environment or {}), daemon=True
        )
        self.process.start()
        theirs.close()
        code, self.address = self._answer("setup")
        assert code == 0

    def begin(self, name: str, *arguments: Any) -> None:
        self._pipe.send((name, arguments))

    def call(self, name: str, *arguments: Any) -> Any:
        self.begin(name, *arguments)
        return self._answer(name)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(WAIT_S)
        self._pipe.close()

    def _answer(self, name: str) -> Any:
        assert self._pipe.poll(WAIT_S), f"no answer to {name}"
        return self._pipe.recv()


@contextlib.contextmanager
def processes(*all_settings: dict, environment: dict[str, str] | None = None):
    started: list[Process] = []
    try:
        for settings in all_settings:
            started.append(Process(settings, environment))
        yield started
    finally:
        for process in started:
            process.kill()
