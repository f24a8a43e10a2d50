"""Two NICs of the guest, connected, with memory to move between them."""

import subprocess

import numpy as np

import mooncake_kernels as mk

FAST = {"timeout": 12, "retries": 2}  # of a connection: 17 ms a try


class Side:
    """A NIC, its queue, one end of a connection, and registered memory."""

    def __init__(self, name: str, num_bytes: int = 1 << 20, **pair_options: int):
        self.device = mk.rdma.open(name)
        self.queue = self.device.completion_queue(1024)
        self.pair = self.queue.queue_pair(**pair_options)
        self.memory = np.zeros(num_bytes, np.uint8)
        self.region = self.device.register(self.memory, "remote_read_write")

    def ranges(self, other: "Side", rows: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Offsets into both memories as addresses."""
        here, there = self.region.address, other.region.address
        return [(here + a, there + b, size) for a, b, size in rows]

    def write(self, other: "Side", rows: list[tuple[int, int, int]], **options: int) -> int:
        return self.pair.write(
            self.region, other.region.remote, self.ranges(other, rows), **options
        )

    def read(self, other: "Side", rows: list[tuple[int, int, int]]) -> int:
        return self.pair.read(self.region, other.region.remote, self.ranges(other, rows))


class Link:
    """Two sides that are connected to each other."""

    def __init__(self, a: str = "rxe0", b: str = "rxe1", num_bytes: int = 1 << 20, **options: int):
        self.a, self.b = Side(a, num_bytes, **options), Side(b, num_bytes, **options)
        self.connect()

    def connect(self, **options: int) -> None:
        for side in (self.a, self.b):
            side.pair.reset()
        self.a.pair.connect(self.b.pair.endpoint, **options)
        self.b.pair.connect(self.a.pair.endpoint, **options)

    def close(self) -> None:
        self.a.device.close()
        self.b.device.close()

    def __enter__(self) -> "Link":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def noise(num_bytes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def shell(command: str) -> None:
    subprocess.run(command.split(), check=True)
