"""Two connected NICs, and the expected contents of their memory."""

import numpy as np

from mooncake_kernels import rdma

from .world import World

SIZE = 1 << 16


def addressed(num_bytes: int, seed: int = 0) -> np.ndarray:
    """Bytes hashed from their own position: data from the wrong place differs."""
    place = np.arange(num_bytes, dtype=np.uint64) + np.uint64(seed << 32)
    return ((place * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(40)).astype(np.uint8)


class Side:
    """A NIC's end: its queue, its queue pair and registered memory."""

    def __init__(
        self, world: World, name: str, memory: np.ndarray, depth: int, piece: int, **sizes: int
    ):
        self.world = world
        self.device = rdma.open(name)
        self.memory = memory
        self.queue = self.device.completion_queue(depth)
        self.pair = self.queue.queue_pair(**sizes)
        self.region = self.device.register(memory, "remote_read_write", max_piece_bytes=piece)

    def drain(self) -> list[rdma.Completion]:
        """Poll until nothing is left: a poll may post more work without completing any."""
        completions = self.queue.poll()
        while self.world.entries(self.device.name):
            completions += self.queue.poll()
        return completions


class Connection:
    """`near` writes to `far`, or reads from it; `expected` is a model of their bytes.

    Memory is not page-aligned, and is registered in pieces if `piece` says so.
    """

    def __init__(
        self, world: World, *, depth: int = 512, piece: int = 0, size: int = SIZE, **sizes: int
    ):
        self.size = size
        memories = [np.empty(size + 24, np.uint8)[24 - 8 * i :][:size] for i in range(2)]
        for i, memory in enumerate(memories):
            memory[:] = addressed(size, i)
        self.near = Side(world, "fake0", memories[0], depth, piece, **sizes)
        self.far = Side(world, "fake1", memories[1], depth, piece, **sizes)
        self.expected = [memory.copy() for memory in memories]
        self.connect()

    def connect(self, **options: int) -> None:
        for side in (self.near, self.far):
            side.pair.reset()
        self.near.pair.connect(self.far.pair.endpoint, **options)
        self.far.pair.connect(self.near.pair.endpoint, **options)

    def submit(self, reads: bool, ranges, immediate: int | None = None) -> int:
        """Ranges as (offset here, offset there, bytes); the token."""
        near, far = self.near.region, self.far.region
        rows = [(near.address + i, far.address + j, n) for i, j, n in ranges]
        if reads:
            return self.near.pair.read(near, far.remote, rows)
        return self.near.pair.write(near, far.remote, rows, immediate=immediate)

    def write(self, ranges, immediate: int | None = None) -> int:
        return self.submit(False, ranges, immediate)

    def read(self, ranges) -> int:
        return self.submit(True, ranges)

    def expect(self, reads: bool, ranges) -> None:
        """What these do, one after another."""
        here, there = self.expected
        for i, j, n in ranges:
            if reads:
                here[i : i + n] = there[j : j + n]
            else:
                there[j : j + n] = here[i : i + n]

    def check_bytes(self) -> None:
        for side, expected in zip((self.near, self.far), self.expected, strict=True):
            np.testing.assert_array_equal(side.memory, expected)

    def close(self) -> None:
        self.near.device.close()
        self.far.device.close()

    def __enter__(self) -> "Connection":
        return self

    def __exit__(self, *exc) -> None:
        self.close()
