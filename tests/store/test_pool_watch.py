"""What comes to a pool and goes, as a process finds it that does nothing itself."""

import random
import time

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool, PoolWatch, object_keys

from .support import child, ended_well, kill, put

SIZE = 4096


class Follower:
    """The keys that must be there, by what was found."""

    def __init__(self, watch: PoolWatch):
        self._watch = watch
        self.keys: set[tuple[int, int]] = set()

    def look(self) -> None:
        found = self._watch.look()
        removed, stored = ({(h, s) for h, s in keys.tolist()} for keys in vars(found).values())
        assert len(removed) == len(found.removed) and removed <= self.keys
        self.keys -= removed
        assert len(stored) == len(found.stored) and not stored & self.keys
        self.keys |= stored


def keys_of(pool: ObjectPool) -> set[tuple[int, int]]:
    return {(h, s) for h, s in pool.objects().keys.tolist()}


def test_look_finds_changes_by_other_processes(pool):
    put(pool, (1, 1), SIZE)
    put(pool, (2, 1), SIZE)
    watch = pool.watch()
    assert sorted(watch.look().stored.tolist()) == [[1, 1], [2, 1]]

    def live():
        with ObjectPool.open(pool.path) as own:
            put(own, (3, 1), SIZE)
            put(own, (4, 1), SIZE)
            own.remove((4, 1))
            own.remove((1, 1))
            put(own, (1, 1), SIZE)
            own.evict_keys(np.array([[2, 1]], np.uint64))
            own.begin((5, 1), SIZE)  # which its death ends

    with child(live) as pid:
        assert ended_well(pid)
    found = watch.look()
    assert sorted(found.removed.tolist()) == [[1, 1], [2, 1]]
    assert sorted(found.stored.tolist()) == [[1, 1], [3, 1]]
    for again in (watch.look(), watch.look()):
        assert again.removed.shape == again.stored.shape == (0, 2)
    assert {tuple(key) for key in pool.watch().look().stored.tolist()} == keys_of(pool)


def test_changes_by_killed_processes_are_found(pool, soak):
    """Whatever they did by then is found, once."""

    def live():
        chance = random.Random()
        with ObjectPool.open(pool.path) as own:
            while True:
                key = (chance.randrange(40), 1)
                if chance.random() < 0.6:
                    put(own, key, chance.randrange(1, 3 * SIZE))
                elif chance.random() < 0.7:
                    own.remove(key)
                else:
                    own.evict(SIZE)

    follower = Follower(pool.watch())
    for _ in range(200 if soak else 15):
        with child(live) as first, child(live) as second:
            until = time.monotonic() + random.uniform(0, 0.02)
            while time.monotonic() < until:
                follower.look()
            kill(first)
            kill(second)
        follower.look()
        assert follower.keys == keys_of(pool)


@pytest.mark.parametrize("num_changes", [65_535, 65_536, 65_537, 200_000])
def test_more_changes_than_the_pool_records(num_changes):
    with ObjectPool.create(64 * 1000, alignment=64, num_objects=1000) as pool:
        keys = object_keys(np.arange(1000), 1)
        put_all(pool, keys)
        follower = Follower(pool.watch())
        follower.look()
        left = num_changes - 3
        while left >= 2:
            part = keys[: min(left // 2, len(keys))]
            pool.remove_each(part)
            put_all(pool, part)
            left -= 2 * len(part)
        pool.remove_each(keys[10:13])
        follower.look()
        assert len(follower.keys) == 997 and follower.keys == keys_of(pool)


def put_all(pool: ObjectPool, keys: np.ndarray) -> None:
    nothing = np.zeros((len(keys), 1), np.uint64)
    pool.put_headed(keys, [b"x"] * len(keys), nothing, nothing, checksum=False)


def test_look_at_a_closed_pool_is_rejected():
    pool = ObjectPool.create(SIZE)
    watch = pool.watch()
    pool.close()
    with pytest.raises(InvalidArgument, match="^look: pool must be open"):
        watch.look()
