"""A process that is killed during a transfer, with its actions decided by a seed."""

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from mooncake_kernels.buffers import shared_memory
from mooncake_kernels.transfer import TransferEngine

from .support import START_S, WAIT_S, addressed, eventually

SIZE = 8 << 20  # of the memory at either side


@dataclass(frozen=True)
class Round:
    """One kill. Blocks are (offset, bytes), the same at either side, and do not touch."""

    seed: int
    transport: str
    mapped: bool
    victim_asks: bool  # it is the initiator; else the target
    direction: str
    blocks: list[tuple[int, int]]
    delay_s: float

    @classmethod
    def of(cls, seed: int) -> "Round":
        rng = np.random.default_rng(seed)
        blocks, offset = [], int(rng.integers(1, 100))
        while True:
            num_bytes = int(np.exp(rng.uniform(0, np.log(4 << 20))))
            if offset + num_bytes >= SIZE:
                break
            blocks.append((offset, num_bytes))
            offset += num_bytes + int(rng.integers(1, 10_000))
        return cls(
            seed=seed,
            transport=str(rng.choice(["tcp", "shm"])),
            mapped=bool(rng.integers(2)),
            victim_asks=bool(rng.integers(2)),
            direction=str(rng.choice(["write", "read"])),
            blocks=[blocks[i] for i in rng.permutation(len(blocks))],
            delay_s=float(np.exp(rng.uniform(np.log(1e-4), np.log(0.05)))),
        )

    @property
    def survivor_is_target(self) -> bool:
        return self.victim_asks == (self.direction == "write")

    def rows(self, local: int, remote: int) -> list[tuple[int, int, int]]:
        return [(local + at, remote + at, num_bytes) for at, num_bytes in self.blocks]

    def start(self, engine, peer, local: int, remote: int) -> list:
        """Begin a request for each block; return their tickets."""
        move = getattr(engine, self.direction)
        return [move(peer, [row]) for row in self.rows(local, remote)]

    def __str__(self) -> str:
        role = "initiator" if self.victim_asks else "target"
        kind = "mapped" if self.mapped else "addressed"
        return (
            f"round {self.seed}: a {role} is killed {self.delay_s * 1e3:.2f} ms into "
            f"{len(self.blocks)} {self.direction}s over {self.transport}, {kind}"
        )


def content(key: int) -> np.ndarray:
    return addressed(SIZE) ^ np.uint8(key)


def memory_of(mapped: bool) -> np.ndarray:
    return shared_memory(SIZE).numpy() if mapped else np.zeros(SIZE, np.uint8)


def live(pipe: Connection, plan: Round, key: int, name: str | None, to: tuple | None) -> None:
    """The main loop of a victim: request all blocks again and again, or serve them, until killed.

    If it is not killed it ends when the survivor hangs up.
    """
    with TransferEngine(name, transports=[plan.transport]) as engine:
        memory = memory_of(plan.mapped)
        memory[:] = content(key)
        region = engine.register(memory)
        pipe.send((engine.name, region.address))
        with contextlib.suppress(EOFError, ConnectionError):  # hung up
            pipe.recv()
            if to is None:
                pipe.recv()
            peer = engine.open(to[0])
            while not pipe.poll():
                tickets = plan.start(engine, peer, region.address, to[1])
                for number, ticket in enumerate(tickets):
                    ticket.wait()
                    pipe.send(number)  # confirmed


@dataclass
class Victim:
    """The process, as its survivor sees it."""

    process: multiprocessing.Process
    pipe: Connection
    name: str
    address: int

    def go(self) -> None:
        self.pipe.send("go")

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.join(WAIT_S)
        assert self.process.exitcode == -signal.SIGKILL

    def told(self) -> list:
        """Everything it has reported until it died."""
        said = []
        with contextlib.suppress(EOFError, ConnectionResetError):
            while self.pipe.poll():
                said.append(self.pipe.recv())
        return said


@contextlib.contextmanager
def victim(plan: Round, key: int, name: str | None, to: tuple | None) -> Iterator[Victim]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=live, args=(theirs, plan, key, name, to), daemon=True)
    process.start()
    theirs.close()
    pid = process.pid
    try:
        assert ours.poll(START_S), "the process did not start"
        yield Victim(process, ours, *ours.recv())
    finally:
        ours.close()
        process.join(WAIT_S)
        ended = process.exitcode
        process.kill()
        process.close()
    assert ended in (0, -signal.SIGKILL), f"it ended with {ended}"
    eventually(lambda: not Path(f"/proc/{pid}").exists(), "a zombie")
