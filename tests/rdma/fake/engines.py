"""Two engines whose data goes over the fake NICs, and memory of theirs."""

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_kernels.topology import Nic, System, Topology
from mooncake_kernels.transfer import Peer, Region, TransferEngine

from .pairs import addressed

UNTOUCHED = 0xEE
ALL = ("fake0", "fake1", "fake2", "fake3")


def topology_of(names: Sequence[str] = ALL) -> Topology:
    """A machine of one NUMA node with these NICs, without any files about them."""
    facts = {"state": "ACTIVE", "gbit_per_s": 100.0, "link_layer": "Ethernet", "has_gid": True}
    return Topology(System(nics=tuple(Nic(name, **facts) for name in names)))


@dataclass
class Engines:
    """The first writes to the second, or reads from it."""

    near: TransferEngine
    far: TransferEngine
    peer: Peer
    here: np.ndarray
    there: np.ndarray
    near_region: Region
    far_region: Region

    def rows(self, ranges) -> list[tuple[int, int, int]]:
        """(offset here, offset there, bytes) as descriptors."""
        here, there = self.near_region.address, self.far_region.address
        return [(here + a, there + b, size) for a, b, size in ranges]

    def write(self, ranges, **options):
        return self.near.write(self.peer, self.rows(ranges), **options)

    def read(self, ranges, **options):
        return self.near.read(self.peer, self.rows(ranges), **options)

    def move(self, direction: str, ranges, **options) -> None:
        """Do it, and check every byte at both ends."""
        expected_here, expected_there = self.here.copy(), self.there.copy()
        for a, b, size in ranges:
            if direction == "write":
                expected_there[b : b + size] = self.here[a : a + size]
            else:
                expected_here[a : a + size] = self.there[b : b + size]
        (self.write if direction == "write" else self.read)(ranges, **options).wait()
        np.testing.assert_array_equal(self.here, expected_here)
        np.testing.assert_array_equal(self.there, expected_there)


@contextlib.contextmanager
def engines(
    num_bytes: int = 1 << 16,
    *,
    near: Sequence[str] = ALL[:2],
    far: Sequence[str] = ALL[2:],
    transports: Sequence[str] = ("rdma",),
    access: str = "read_write",
) -> Iterator[Engines]:
    with (
        TransferEngine(transports=transports, topology=topology_of(near)) as first,
        TransferEngine(transports=transports, topology=topology_of(far)) as second,
    ):
        here, there = addressed(num_bytes), addressed(num_bytes, 1)
        regions = first.register(here), second.register(there, access)
        with first.open(second.name) as peer:
            yield Engines(first, second, peer, here, there, *regions)
