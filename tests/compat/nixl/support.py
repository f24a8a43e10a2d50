"""Agents with memory, in this process and in others."""

import contextlib
import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from mooncake_serving.compat.nixl import nixl_agent, nixl_agent_config

from ...stopping import stop
from ..support import SIZE, WAIT_S, addressed, untouched

BLOCK = 4096
NUM_BLOCKS = SIZE // BLOCK


def telemetered(**options) -> nixl_agent_config:
    return nixl_agent_config(capture_telemetry=True, **options)


@dataclass
class Near:
    """An agent of this process and its registered memory, in blocks."""

    agent: nixl_agent
    memory: np.ndarray

    @property
    def address(self) -> int:
        return self.memory.ctypes.data

    @property
    def name(self) -> str:
        return self.agent.name

    @property
    def metadata(self) -> bytes:
        return self.agent.get_agent_metadata()

    def blocks(self, num_bytes: int = BLOCK) -> np.ndarray:
        return rows_at(self.address, num_bytes)

    def read(self) -> np.ndarray:
        return self.memory.copy()

    def notifs(self) -> dict:
        return self.agent.get_new_notifs()

    def close(self) -> None:
        self.agent.agent.close()


@dataclass
class Far:
    """An agent of another process, whose memory is untouched."""

    process: multiprocessing.Process
    pipe: Any
    name: str
    metadata: bytes
    address: int

    def call(self, method: str, *arguments):
        self.pipe.send((method, arguments))
        assert self.pipe.poll(WAIT_S), f"no answer to {method}"
        return self.pipe.recv()

    def blocks(self, num_bytes: int = BLOCK) -> np.ndarray:
        return rows_at(self.address, num_bytes)

    def read(self) -> np.ndarray:
        return np.frombuffer(self.call("read"), np.uint8)

    def notifs(self) -> dict:
        return self.call("get_new_notifs")

    def stop(self) -> None:
        stop(self.process.pid)

    def go_on(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(WAIT_S)


def rows_at(address: int, num_bytes: int = BLOCK) -> np.ndarray:
    rows = np.zeros((SIZE // num_bytes, 3), np.uint64)
    rows[:, 0] = address + np.arange(len(rows)) * num_bytes
    rows[:, 1] = num_bytes
    return rows


def reg_list(memory: np.ndarray) -> list:
    return [(memory.ctypes.data, memory.nbytes, 0, "")]


@contextlib.contextmanager
def near_agent(name: str, memory: np.ndarray, **options):
    near = Near(nixl_agent(name, telemetered(**options)), memory)
    near.agent.register_memory(reg_list(memory), "DRAM")
    try:
        yield near
    finally:
        near.close()


def serve(pipe, name: str, ucx_tls: str) -> None:
    """The main loop of the other process: offer memory, and make the requested calls."""
    os.environ["UCX_TLS"] = ucx_tls
    agent, memory = nixl_agent(name), untouched(SIZE)
    agent.register_memory(reg_list(memory), "DRAM")
    pipe.send((agent.get_agent_metadata(), memory.ctypes.data))
    with contextlib.suppress(EOFError):
        while True:
            method, arguments = pipe.recv()
            if method == "read":
                pipe.send(memory.tobytes())
            elif method == "fill":
                memory[:] = addressed(SIZE)
                pipe.send(None)
            elif method == "deregister":
                agent.deregister_memory(agent.get_reg_descs(reg_list(memory), "DRAM"))
                pipe.send(None)
            elif method == "watch":
                pipe.send(first_notice(agent, memory))
            else:
                pipe.send(getattr(agent, method)(*arguments))


def first_notice(agent: nixl_agent, memory: np.ndarray) -> tuple:
    """The first notification, and what memory is at that moment."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        if messages := agent.get_new_notifs():
            return messages, memory.tobytes()
    return {}, b""


@contextlib.contextmanager
def far_agent(name: str = "far", ucx_tls: str = "all"):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    arguments = (theirs, name, ucx_tls)
    process = context.Process(target=serve, args=arguments, daemon=True)
    process.start()
    theirs.close()
    far = Far(process, ours, name, b"", 0)
    try:
        assert ours.poll(WAIT_S), "the other process did not start"
        far.metadata, far.address = ours.recv()
        yield far
    finally:
        far.kill()
        ours.close()


def settle(agent: nixl_agent, handle) -> str:
    """Poll until it is over; its failure is raised."""
    until = time.monotonic() + WAIT_S
    while (state := agent.check_xfer_state(handle)) == "PROC":
        assert time.monotonic() < until, "the transfer does not end"
        time.sleep(0.0005)
    return state


def gathered(take, count: int = 1) -> dict:
    """Notifications, once that many have come."""
    messages: dict[str, list[bytes]] = {}
    until = time.monotonic() + WAIT_S
    while sum(map(len, messages.values())) < count:
        assert time.monotonic() < until, f"only {messages!r:.200} came"
        for name, new in take().items():
            messages.setdefault(name, []).extend(new)
        time.sleep(0.0005)
    return messages


def sides(near: Near, far) -> tuple:
    """Prepared lists of the blocks of both, of agents that know each other."""
    near.agent.add_remote_agent(far.metadata)
    return (
        near.agent.prep_xfer_dlist("NIXL_INIT_AGENT", near.blocks(), "DRAM"),
        near.agent.prep_xfer_dlist(far.name, far.blocks(), "DRAM"),
    )
