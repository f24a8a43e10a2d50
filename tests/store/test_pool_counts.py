"""What a pool counts of what all processes do with it; test_pool_counts.cc has more."""

import os
import signal

import numpy as np
import pytest

from mooncake_kernels.errors import ChecksumError, InvalidArgument
from mooncake_kernels.pool import ObjectPool, PoolCounts, PutResult

from .support import child, ended_well, kill

UNIT = 4096


@pytest.fixture
def pool():
    with ObjectPool.create(64 * UNIT, num_objects=64, num_processes=4) as made:
        yield made


def test_reads(pool):
    assert pool.counts() == PoolCounts() and PoolCounts().hit_rate is None
    pool.put_from((1, 0), b"12", np.zeros(3))
    with pool.begin((2, 0), 10):
        pass
    buffer, small = np.zeros(30, np.uint8), np.zeros(4, np.uint8)
    assert pool.get_into((1, 0), buffer) == 26 and pool.get_into((3, 0), buffer) is None
    assert pool.get_into((1, 0), small, offset=3) == 26
    assert pool.counts() == PoolCounts(2, 1, 2, read_bytes=30, stored_bytes=36)
    keys = np.array([[1, 0], [3, 0], [2, 0], [1, 0]], np.uint64)
    got = pool.get_into_each(keys, [buffer, buffer.copy(), buffer.copy(), small])
    assert got.tolist() == [26, -1, 10, -2]
    with pool.pin((1, 0)):
        assert pool.pin((3, 0)) is None
    counts = PoolCounts(5, 3, 2, read_bytes=92, stored_bytes=36)
    assert pool.counts() == counts and counts.num_reads == 8 and counts.hit_rate == 5 / 8
    with pytest.raises(InvalidArgument, match="room"):
        pool.get_into((1, 0), small)
    with pytest.raises(InvalidArgument, match="within the object's 26 bytes"):
        pool.get_into((1, 0), small, offset=25)
    pool.memory().fill_(1)
    with pytest.raises(ChecksumError):
        pool.get_into((1, 0), buffer, verify=True)
    assert pool.get_into_each(keys[:1], [buffer], verify=True).tolist() == [-4]
    pool.pin((1, 0), touch=False).close()
    assert pool.pin((3, 0), touch=False) is None
    assert not pool.contains((3, 0)) and not pool.contains_each(keys[1:2]).any()
    assert pool.match_prefix(keys) == 1 and len(pool.ids_of(keys)) == len(pool.objects().keys) + 2
    assert pool.counts() == counts


def test_reads_and_puts_with_heads(pool):
    value = np.ones(10, np.uint8)
    places = np.full((3, 1), value.ctypes.data, np.uint64), np.full((3, 1), 10, np.uint64)
    keys, heads = np.array([[1, 1], [2, 1], [1, 1]], np.uint64), [b"a", b"bb", b"ccc"]
    assert pool.put_headed(keys, heads, *places).count(PutResult.STORED) == 2
    keys[2] = 3
    assert pool.get_headed(keys, heads, *places).tolist() == [10, 10, -1]
    assert pool.get_headed(keys, [b"x", b"bb", b"ccc"], *places).tolist() == [-5, 10, -1]
    assert pool.counts() == PoolCounts(3, 2, 2, read_bytes=30, stored_bytes=23)


def test_changes(pool):
    for number in range(8):
        pool.put_from((number, 0), bytes(10))
    assert pool.put_from((1, 0), b"again") is PutResult.EXISTS
    pool.begin((9, 0), 10).abort()
    assert pool.remove((0, 0)) and not pool.remove((0, 0))
    keys = np.array([[1, 0], [9, 0], [2, 0]], np.uint64)
    assert pool.remove_each(keys).sum() == 2
    assert pool.remove_exactly((3, 0), int(pool.ids_of(np.array([[3, 0]], np.uint64))[0]))
    assert len(pool.evict(2 * UNIT).keys) == 2  # the oldest, 4 and 5
    assert len(pool.evict_keys(np.array([[5, 0], [6, 0]], np.uint64)).keys) == 1
    before = PoolCounts(num_stored=8, num_removed=4, num_evicted=3, stored_bytes=80)
    assert pool.counts() == before
    pool.put_from((10, 0), b"x")
    assert pool.counts() - before == PoolCounts(num_stored=1, stored_bytes=1)


def test_counts_survive_exited_and_killed_processes(pool):
    buffer = np.zeros(10, np.uint8)
    pool.put_from((1, 0), bytes(10))
    ready, tell = os.pipe()

    def use(own):
        for number in range(100):
            own.get_into((1, 0), buffer)
            own.get_into((2, 0), buffer)
            own.put_from((5, number), b"x")
            own.remove((5, number))

    def ends():
        with ObjectPool.open(pool.path) as own:
            use(own)

    def is_killed():
        use(ObjectPool.open(pool.path))
        os.write(tell, b"!")
        signal.pause()

    for turn in range(1, 6):  # more than the pool has room for at once
        with child(ends) as pid:
            assert ended_well(pid)
        with child(is_killed) as pid:
            assert os.read(ready, 1) == b"!"
            kill(pid)
        use(pool)
        num = 300 * turn
        assert pool.counts() == PoolCounts(num, num, 1 + num, num, 0, 10 * num, 10 + num)
    os.close(ready)
    os.close(tell)


def test_forked_child_sees_the_counts(pool):
    pool.put_from((1, 0), bytes(10))

    def life():
        assert pool.counts().num_stored == 1

    with child(life) as pid:
        assert ended_well(pid)


def test_counts_start_at_zero_with_a_new_pool(tmp_path):
    path = tmp_path / "pool"
    for _ in range(2):
        with ObjectPool.create(UNIT, path) as pool:
            assert pool.counts() == PoolCounts()
            pool.put_from((1, 0), b"x")
        with ObjectPool.open(path) as pool:
            assert pool.counts().num_stored == 1
        path.unlink()
    with pytest.raises(InvalidArgument, match="must be open"):
        pool.counts()
