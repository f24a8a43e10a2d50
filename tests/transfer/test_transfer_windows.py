"""Windows: parts of a region that peers may read while they are open."""

import contextlib
import threading

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine, Window

from .support import Pair, untouched

MAY_NOT = "may not read"


class Reads:
    """Memory of one engine with windows on it, and reads by another."""

    def __init__(self, pair: Pair, num_bytes: int = 1 << 16):
        self.pair = pair
        self.far = np.random.default_rng(1).integers(0, 256, num_bytes, np.uint8)
        self.near = untouched(num_bytes)
        self.region = pair.far.register(self.far, "windows")
        self.into = pair.near.register(self.near).address

    def window(self, offset: int, num_bytes: int) -> Window:
        return self.region.window(self.region.address + offset, num_bytes)

    def read(self, *parts: tuple[int, int], **options) -> None:
        """Read parts, (offset, bytes); what arrives is right."""
        self.near[:] = 0
        rows = [(self.into + at, self.region.address + at, size) for at, size in parts]
        self.pair.near.read(self.pair.peer, rows, **options).wait()
        for at, size in parts:
            assert np.array_equal(self.near[at : at + size], self.far[at : at + size])

    def refuses(self, *parts: tuple[int, int], **options) -> bool:
        with pytest.raises(TransferError, match=MAY_NOT):
            self.read(*parts, **options)
        return True


def test_peers_read_only_inside_windows(pair):
    reads = Reads(pair)
    assert reads.refuses((0, 1)) and reads.refuses((0, 1 << 16))
    one, two = reads.window(4096, 4096), reads.window(16384, 100)
    for options in ({}, {"checksum": True}):
        reads.read((4096, 4096), **options)
        reads.read((5000, 7), (16384, 100), (4096, 1), (8191, 1), **options)
        for part in ((4095, 2), (8191, 2), (4096, 4097), (16384, 101), (0, 1 << 16), (65535, 1)):
            assert reads.refuses(part, **options)
        for part in ((4095, 2), (8191, 2), (65535, 1)):
            assert reads.refuses((16384, 1), part, **options)
    one.close()
    one.close()
    assert reads.refuses((4096, 1))
    reads.read((16384, 100))
    two.close()
    assert reads.refuses((16384, 1))
    with reads.window(0, 1 << 16):
        reads.read((0, 1 << 16))
    assert reads.refuses((0, 1))


def test_windows_may_coincide_and_overlap(pair):
    reads = Reads(pair)
    one, two = reads.window(0, 4096), reads.window(0, 4096)
    with reads.window(2048, 4096), reads.window(0, 8192):
        reads.read((0, 8192))
        reads.read((100, 4000))
    one.close()
    one.close()
    reads.read((0, 4096))
    assert reads.refuses((4096, 1))
    two.close()
    assert reads.refuses((0, 1))


def test_no_one_writes_to_a_window(pair):
    reads = Reads(pair)
    with reads.window(0, 4096):
        before = reads.far.copy()
        ticket = pair.near.write(pair.peer, [(reads.into, reads.region.address, 100)])
        with pytest.raises(TransferError, match="may not write"):
            ticket.wait()
        assert np.array_equal(reads.far, before)


def test_owner_uses_the_whole_region(pair):
    reads = Reads(pair)
    source = np.full(4096, 5, np.uint8)
    offered = pair.near.register(source, "read")
    with pair.far.open(pair.near.name) as back:
        pair.far.read(back, [(reads.region.address, offered.address, 4096)]).wait()
    assert (reads.far[:4096] == 5).all()


def test_closing_a_region_closes_its_windows(pair):
    reads = Reads(pair)
    window = reads.window(0, 4096)
    reads.region.close()
    with pytest.raises(TransferError):
        reads.read((0, 1))
    again = pair.far.register(reads.far, "windows")
    other = again.window(again.address, 4096)
    window.close()  # not the other one
    reads.region.close()
    reads.read((0, 4096))
    other.close()


def test_windows_are_not_listed_as_regions(pair):
    reads = Reads(pair)
    if pair.peer.transport == "tcp":
        return  # without a secret nothing is
    with reads.window(0, 4096):
        assert pair.near.regions(pair.peer) == []


def test_closed_window_is_not_read(pair):
    """What is written then never arrives."""
    if pair.peer.transport == "shm":
        pytest.skip("a process of the same user that copies by itself is not waited for")
    reads = Reads(pair, 16 << 20)
    for round_ in range(20):
        reads.far[:] = 1
        reads.near[:] = 0
        window = reads.window(0, 16 << 20)
        rows = [(reads.into, reads.region.address, 16 << 20)]
        ticket = pair.near.read(pair.peer, rows)
        closing = threading.Timer(round_ / 4000, window.close)
        closing.start()
        closing.join()
        reads.far[:] = 2
        with contextlib.suppress(TransferError):
            ticket.wait()
        assert not (reads.near == 2).any()


def test_arguments():
    memory = np.zeros(8192, np.uint8)
    memory.flags.writeable = False
    with TransferEngine() as engine:
        region = engine.register(memory, "windows")
        assert region.access == "windows"
        for address, num_bytes in (
            (region.address, 0),
            (region.address - 1, 2),
            (region.address, 8193),
            (region.address + 8192, 1),
            (region.address, (1 << 64) - 1),
        ):
            with pytest.raises(InvalidArgument, match="window: range must be inside"):
                region.window(address, num_bytes)
        with pytest.raises(InvalidArgument, match="access to windows"):
            engine.register(np.zeros(1, np.uint8)).window(0, 1)
        region.close()
        with pytest.raises(InvalidArgument, match="region must be open"):
            region.window(region.address, 1)
