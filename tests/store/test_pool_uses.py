"""What an entry records for policies: its object's uses, by any process, and its position."""

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool

from .support import child, ended_well, put


def columns(pool: ObjectPool) -> dict[int, tuple[int, int]]:
    objects = pool.objects()
    pairs = zip(objects.uses.tolist(), objects.position.tolist(), strict=True)
    return dict(zip(objects.keys[:, 0].tolist(), pairs, strict=True))


def test_uses_and_positions(pool):
    put(pool, (1, 0), 100)
    put(pool, (2, 0), 100, position=7)
    with pool.begin((3, 0), 100, position=70_000) as writing:
        writing.view[:] = bytes(100)
    assert columns(pool) == {1: (1, 0), 2: (1, 7), 3: (1, 65535)}
    pool.pin((1, 0)).close()
    pool.get_into((1, 0), bytearray(100))
    pool.get_into_each([(2, 0), (9, 0)], [bytearray(100), bytearray(100)])
    pool.contains((3, 0))
    assert columns(pool) == {1: (3, 0), 2: (2, 7), 3: (1, 65535)}
    pool.remove((1, 0))
    put(pool, (1, 0), 100)
    assert columns(pool)[1] == (1, 0)
    assert (pool.objects().num_bytes == 100).all()


def test_uses_of_other_processes_count(pool):
    put(pool, (1, 0), 100)

    def life() -> None:
        with ObjectPool.open(pool.path) as own:
            for _ in range(5):
                own.pin((1, 0)).close()

    with child(life) as pid:
        assert ended_well(pid)
    assert columns(pool) == {1: (6, 0)}


def test_pin_without_touch_does_not_count_as_use(pool):
    for i in range(3):
        put(pool, (i, 0), 100)
    with pool.pin((0, 0), touch=False) as pinned:
        pinned.verify()
        assert pool.evict(1).keys.tolist() == [[1, 0]]  # for it is being read
    assert columns(pool) == {0: (1, 0), 2: (1, 0)}
    pool.pin((2, 0)).close()
    assert pool.evict(1, "sieve").keys.tolist() == [[0, 0]]
    assert pool.pin((0, 0), touch=False) is None
    with pytest.raises(InvalidArgument, match="pin: touch must be"):
        pool.pin((2, 0), touch="no")


def test_num_pins_is_reported(pool):
    with ObjectPool.create(1 << 20, num_pins=3) as own, ObjectPool.open(own.path) as other:
        assert own.num_pins == other.num_pins == 3 != pool.num_pins


def test_use_count_saturates(pool):
    put(pool, (1, 0), 1)
    keys, buffers = np.array([(1, 0)] * 66_000, np.uint64), [bytearray(1)] * 66_000
    pool.get_into_each(keys, buffers)
    assert columns(pool) == {1: (65535, 0)}


def test_order_uses_reorders_without_counting(pool):
    """The keys exchange the times of their last uses; those that are not there are passed over."""
    for i in range(6):
        put(pool, (i, 0), 10)
    before = pool.objects()
    pool.order_uses(np.array([(4, 0), (9, 9), (1, 0), (0, 0), (4, 0)], np.uint64))
    after = pool.objects()
    assert sorted(before.recency.tolist()) == sorted(after.recency.tolist())
    assert columns(pool) == dict.fromkeys(range(6), (1, 0))
    for expected in (4, 1, 2, 3, 0, 5):
        assert pool.evict(1).keys.tolist() == [[expected, 0]]


def test_order_uses_covers_soft_and_hard_objects(pool):
    for i, retention in enumerate(("soft", "hard", "normal", "soft")):
        put(pool, (i, 0), 10, retention=retention)
    pool.order_uses([(3, 0), (2, 0), (1, 0), (0, 0)])
    assert [pool.evict(1).keys.tolist() for _ in range(4)] == [[[2, 0]], [[3, 0]], [[0, 0]], []]
    pool.retain((1, 0), "normal")
    assert pool.evict(1).keys.tolist() == [[1, 0]]


def test_order_uses_with_empty_and_invalid_keys(pool):
    pool.order_uses(np.empty((0, 2), np.uint64))
    with pytest.raises(InvalidArgument, match="order_uses: keys must be"):
        pool.order_uses([1])
