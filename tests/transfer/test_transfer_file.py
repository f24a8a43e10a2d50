"""The transport file: memory to file and back, bitwise."""

import asyncio
import itertools
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mooncake_kernels import config
from mooncake_kernels.transfer import TransferEngine

from .files import PAGE, Pool, has_io_uring, open_files, paged
from .support import UNTOUCHED, addressed

MIB = 1 << 20
SIZES = [1, 2, 511, 4095, 4096, 4097, 65_535, 300_001, MIB, 3 * MIB + 5, 17 * MIB]
PLACES = [(0, 0), (0, 1000), (1, 0), (100, 8292), (512, 512)]  # in memory, and in the file
# Every size at two places, every place with four sizes.
CASES = [(size, *PLACES[(i + 2 * k) % 5]) for i, size in enumerate(SIZES) for k in (0, 1)]


@pytest.fixture(params=["disk", "memory"])
def folder(request, tmp_path):
    """Where there is O_DIRECT, most likely; and tmpfs, where there was none for long."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("there is no /dev/shm to write to")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@pytest.mark.parametrize(("size", "at", "offset"), CASES)
def test_any_size_at_any_offset(folder, size, at, offset):
    room = max(at, offset) + size + PAGE
    with Pool(folder / "pool", room) as pool:
        assert pool.peer.transport == "file"
        pool.engine.read(pool.peer, pool.rows([(at, offset, size)])).wait()
        expected = np.full(room, UNTOUCHED, np.uint8)
        expected[at : at + size] = addressed(room)[offset : offset + size]
        assert np.array_equal(pool.memory, expected)

        pool.memory[:] = ~addressed(room)
        pool.engine.write(pool.peer, pool.rows([(at, offset, size)])).wait()
        expected = addressed(room)
        expected[offset : offset + size] = pool.memory[at : at + size]
        assert np.array_equal(pool.content(), expected)


@pytest.mark.parametrize("at,offset", [(0, 0), (100, 8292)])
def test_large_file_of_up_to_one_gib(tmp_path, at, offset, soak):
    """A quarter of one without --soak, written and read back; each word of it another."""
    size = (1024 if soak else 256) * MIB + 8
    words = np.arange(size // 8, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    path = tmp_path / "pool"
    path.write_bytes(b"")
    os.truncate(path, offset + size)
    with TransferEngine() as engine, engine.open(f"file:{path}") as peer:
        memory = paged(at + size + PAGE)
        region = engine.register(memory)
        ours = memory[at : at + size]
        ours[:] = words.view(np.uint8)
        row = (region.address + at, offset, size)
        engine.write(peer, [row]).wait()
        found = np.memmap(path, np.uint8, "r", offset, size)
        for i in range(0, size, MIB):
            assert np.array_equal(found[i : i + MIB], ours[i : i + MIB])
        ours[:] = UNTOUCHED
        engine.read(peer, [row]).wait()
        for i in range(0, size, MIB):
            assert np.array_equal(found[i : i + MIB], ours[i : i + MIB])


@pytest.mark.parametrize(
    ("size", "scattered"), [(1000, "both"), (4096, "memory"), (65_536, "file"), (65_536, "both")]
)
@pytest.mark.parametrize("direction", ["write", "read"])
def test_many_blocks(folder, size, scattered, direction):
    count = 1500 if size < 65_536 else 100
    rng = np.random.default_rng(size)
    places, offsets = np.arange(count) * size, np.arange(count) * size
    if scattered != "file":
        places = rng.permutation(places)
    if scattered != "memory":
        offsets = rng.permutation(offsets)
    with Pool(folder / "pool", count * size) as pool:
        blocks = addressed(count * size).reshape(count, size)
        if direction == "write":
            pool.memory[:] = ~addressed(count * size)
            blocks[offsets // size] = pool.memory.reshape(count, size)[places // size]
            call = pool.engine.write_blocks
        else:
            call = pool.engine.read_blocks
        call(pool.peer, pool.region.address + places, offsets, size).wait()
        assert np.array_equal(pool.content().reshape(count, size), blocks)
        if direction == "read":
            moved = pool.memory.reshape(count, size)[places // size]
            assert np.array_equal(moved, blocks[offsets // size])


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_result_is_independent_of_lane_count(tmp_path, lanes):
    size = 17 * MIB + 4097
    with config.override(transfer_lanes=lanes), Pool(tmp_path / "pool", size + 3) as pool:
        pool.engine.read(pool.peer, pool.rows([(0, 3, size)])).wait()
        assert np.array_equal(pool.memory[:size], addressed(size + 3)[3:])
        pool.memory[:] = ~addressed(size + 3)
        pool.engine.write(pool.peer, pool.rows([(0, 0, size)])).wait()
        assert np.array_equal(pool.content()[:size], pool.memory[:size])


@st.composite
def pieces(draw):
    """Ranges of a file that do not overlap, each with a place in memory of its own."""
    sizes = draw(st.lists(st.integers(1, 3 * PAGE), min_size=1, max_size=12))
    gaps = draw(st.lists(st.sampled_from([0, 0, 1, 512, PAGE]), min_size=12, max_size=12))
    order = draw(st.permutations(range(len(sizes))))
    ranges, offset = [], draw(st.integers(0, PAGE))
    for size, gap in zip(sizes, gaps, strict=False):
        ranges.append((offset, size))
        offset += size + gap
    rows, at = [], draw(st.sampled_from([0, 0, 3, 512]))
    for i in order:
        aligned = draw(st.booleans())  # as its offset in the file is, which goes past the cache
        at = -(-at // PAGE) * PAGE + ranges[i][0] % PAGE if aligned else at
        rows.append((at, *ranges[i]))
        at += ranges[i][1]
    return rows


@given(rows=pieces(), write=st.booleans())
@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_ranges(tmp_path, rows, write):
    room = 40 * 3 * PAGE
    with Pool(tmp_path / "pool", room) as pool:
        memory, content = np.full(room, UNTOUCHED, np.uint8), addressed(room)
        if write:
            memory = ~content
            pool.memory[:] = memory
        for at, offset, size in rows:
            if write:
                content[offset : offset + size] = memory[at : at + size]
            else:
                memory[at : at + size] = content[offset : offset + size]
        call = pool.engine.write if write else pool.engine.read
        call(pool.peer, pool.rows(rows)).wait()
        assert np.array_equal(pool.memory, memory)
        assert np.array_equal(pool.content(), content)


def test_many_concurrent_requests(folder):
    count, size = 500, 8192
    with Pool(folder / "pool", count * size) as pool:
        rows = pool.rows([(i * size, (count - 1 - i) * size, size) for i in range(count)])
        tickets = [pool.engine.read(pool.peer, [row]) for row in rows]

        async def main():
            await asyncio.gather(*[wait(ticket) for ticket in tickets])

        async def wait(ticket):
            await ticket

        asyncio.run(main())
        blocks = addressed(count * size).reshape(count, size)
        assert np.array_equal(pool.memory.reshape(count, size), blocks[::-1])


def test_read_only_memory_can_be_written_to_a_file(tmp_path):
    with Pool(tmp_path / "pool", PAGE) as pool:
        source = np.frombuffer(bytes(range(256)), np.uint8)
        with pool.engine.register(source, access="read") as region:
            pool.engine.write(pool.peer, [(region.address, 100, 256)]).wait()
        assert np.array_equal(pool.content()[100:356], source)


def test_grown_file_is_writable(folder):
    with Pool(folder / "pool", 2 * PAGE) as pool:
        os.truncate(pool.path, PAGE)
        row = pool.rows([(0, PAGE, PAGE)])
        with pytest.raises(Exception, match="is not inside the file of 4096 bytes"):
            pool.engine.write(pool.peer, row).wait()
        os.truncate(pool.path, 2 * PAGE)
        pool.engine.write(pool.peer, row).wait()
        assert (pool.content()[PAGE:] == UNTOUCHED).all()


def test_sync_covers_all_earlier_writes(tmp_path):
    with Pool(tmp_path / "pool", 9 * MIB) as pool:
        for _ in range(8):
            pool.memory[:] = addressed(9 * MIB)
            pool.engine.write(pool.peer, pool.rows([(0, 0, 9 * MIB)])).wait()
            pool.memory[:] = UNTOUCHED
            cuts = [0, 5000, 8 * MIB, 8 * MIB + 2, 9 * MIB]  # for one piece, and for several
            for begin, end in itertools.pairwise(cuts):
                pool.engine.write(pool.peer, pool.rows([(begin + 1, begin, end - begin - 1)]))
            synced = pool.peer.sync()
            synced.wait()
            assert synced.num_bytes == 0
            assert (np.delete(pool.content(), [end - 1 for end in cuts[1:]]) == UNTOUCHED).all()


def test_stats(tmp_path):
    with Pool(tmp_path / "pool", PAGE) as pool:
        pool.engine.write(pool.peer, pool.rows([(0, 0, 1000)])).wait()
        pool.engine.read(pool.peer, pool.rows([(0, 0, 10)])).wait()
        counters = {"num_bytes_read": 10, "num_bytes_written": 1000}
        counters |= {"num_requests": 2, "num_errors": 0}
        [(transport, of_all)] = pool.engine.stats()["transports"].items()
        [(peer, of_peer)] = pool.engine.stats()["peers"].items()
        assert (transport, peer) == ("file", f"file:{pool.path}")
        assert of_all == of_peer and counters.items() <= of_peer.items()


def test_two_engines_and_a_peer_of_another_kind(tmp_path):
    with Pool(tmp_path / "pool", PAGE) as pool, TransferEngine() as far:
        region = far.register(np.zeros(PAGE, np.uint8))
        engine_peer = pool.engine.open(far.name)
        pool.engine.read(pool.peer, pool.rows([(0, 0, PAGE)])).wait()
        row = (pool.region.address, region.address, PAGE)
        pool.engine.write(engine_peer, [row]).wait()
        assert engine_peer.transport == "local"
        own = far.open(f"file:{pool.path}")
        far.write(own, [(region.address, 7, 100)]).wait()
        assert np.array_equal(pool.content()[7:107], addressed(PAGE)[:100])


def test_io_uring_is_used_if_permitted(tmp_path):
    with Pool(tmp_path / "pool", PAGE):
        assert any("[io_uring]" in link for link in open_files()) == has_io_uring()
