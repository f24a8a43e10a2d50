"""Processes that share a pool and are killed: what the others find.

``--soak`` makes it 200 kills at random moments instead of 12.
"""

import os
import random
import signal
import sys
import time

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool, PutResult

from ..stopping import stop
from .support import check, child, content, ended_well, eventually, kill, put

KEY = (7, 1)


def test_a_killed_writer_leaves_nothing(pool):
    def write():
        with ObjectPool.open(pool.path) as own:
            writing = own.begin(KEY, 60 * 4096)
            writing.view[:100] = bytes(100)
            time.sleep(60)

    with child(write) as pid:
        eventually(lambda: pool.stats().num_writing == 1)
        assert pool.begin(KEY, 1) is PutResult.BEING_WRITTEN and not pool.contains(KEY)
        assert pool.contains_each([KEY], or_written=True).all()
        os.kill(pid, signal.SIGKILL)
        # A zombie, that no one has waited for: it is known to be dead all the same.
        eventually(lambda: not pool.contains_each([KEY], or_written=True).any())
        assert pool.stats().num_writing == 1
        eventually(lambda: put(pool, KEY, 4096) is PutResult.STORED)
    assert check(pool) == 1 and pool.stats().free_bytes == 63 * 4096


def test_a_killed_reader_holds_nothing(pool):
    put(pool, KEY, 60 * 4096)

    def read():
        with ObjectPool.open(pool.path) as own:
            pinned = own.pin(KEY)
            np.frombuffer(pinned.view, np.uint8)
            time.sleep(60)

    with child(read) as pid:
        eventually(lambda: pool.stats().num_pins == 1)
        assert len(pool.evict(1).keys) == 0 and pool.contains(KEY)
        assert pool.remove(KEY) and pool.stats().doomed_bytes == 60 * 4096
        assert put(pool, KEY, 60 * 4096) is PutResult.FULL
        kill(pid)
        assert pool.evict(60 * 4096).num_bytes == 60 * 4096  # which looks for the dead
        assert put(pool, KEY, 60 * 4096) is PutResult.STORED
    assert check(pool) == 1


def test_pool_outlives_its_creator():
    """Also one without a name, for as long as somebody has it open."""
    made_end, ready = os.pipe()

    def make():
        own = ObjectPool.create(1 << 20)
        put(own, KEY, 1000)
        os.write(ready, own.path.encode())
        time.sleep(60)

    with child(make) as pid:
        with ObjectPool.open(os.read(made_end, 100).decode()) as pool:
            kill(pid)
            assert check(pool) == 1 and put(pool, (8, 1), 1000) is PutResult.STORED
    os.close(made_end)
    os.close(ready)


def test_stopped_reader_keeps_its_pin(pool):
    put(pool, KEY, 10)

    def read():
        with ObjectPool.open(pool.path) as own:
            pinned = own.pin(KEY)
            time.sleep(60)
            pinned.close()

    with child(read) as pid:
        eventually(lambda: pool.stats().num_pins == 1)
        stop(pid)
        assert pool.reap() == 0 and pool.stats().num_pins == 1
        assert len(pool.evict(1).keys) == 0 and put(pool, (8, 1), 1) is PutResult.STORED


def test_child_must_open_the_pool_itself(pool):
    put(pool, KEY, 5000)
    pinned, writing = pool.pin(KEY), pool.begin((8, 1), 10)

    def refuse():
        calls = [pool.stats, writing.commit, lambda: pool.pin(KEY), lambda: put(pool, (9, 1), 1)]
        for call in calls:
            with pytest.raises(InvalidArgument, match="must be used in the process that made it"):
                call()
        assert pool.contains(KEY)
        with ObjectPool.open(pool.path) as own:
            assert bytes(own.pin(KEY).view) == content(KEY, 5000).tobytes()

    with child(refuse) as pid:
        assert ended_well(pid)
    assert pool.stats().num_pins == 1  # which the child has not given up
    pinned.close()
    writing.view[:] = content((8, 1), 10)
    writing.commit()
    assert check(pool) == 2


def test_one_of_many_writers_of_a_key_wins(pool):
    """Each of 5 keys is put by 3 processes at once: one stores it, and all read equal bytes."""
    num_keys = 5
    results = []
    for i in range(num_keys):
        read_end, write_end = os.pipe()

        def race(key=(i, 0), out=write_end):
            with ObjectPool.open(pool.path) as own:
                result = put(own, key, 6000)
                while result is PutResult.BEING_WRITTEN:
                    result = put(own, key, 6000)
                with own.pin(key) as pinned:
                    assert bytes(pinned.view) == content(key, 6000).tobytes()
                os.write(out, bytes([result.value]))

        with child(race) as first, child(race) as second, child(race) as third:
            assert all(ended_well(pid) for pid in (first, second, third))
        results.append(sorted(os.read(read_end, 10)))
        os.close(read_end)
        os.close(write_end)
        pool.remove((i, 0))
    assert results == [[0, 1, 1]] * num_keys


def live(path: str, seed: int) -> None:
    """Everything that can be done to a pool, over and over."""
    rng = random.Random(seed)
    with ObjectPool.open(path) as pool:
        pins = []
        while True:
            key, num_bytes = (rng.randrange(40), 0), rng.randrange(5 * 4096)
            action = rng.randrange(10)
            if action < 4:
                if put(pool, key, num_bytes) is PutResult.FULL:
                    pool.evict(num_bytes, rng.choice(["lru", "sieve"]))
            elif action < 6:
                pins.append(pool.pin(key))
                if len(pins) > 6:
                    pins.clear()
            elif action == 6:
                pool.remove(key)
            elif action == 7:
                pool.retain(key, rng.choice(["normal", "soft", "hard"]))
            elif action == 8 and not isinstance(writing := pool.begin(key, num_bytes), PutResult):
                writing.abort()
            else:
                out = np.zeros(5 * 4096, np.uint8)
                size = pool.get_into(key, out, verify=True)
                assert size is None or (out[:size] == content(key, size)).all()


def test_killed_at_random_moments(pool, soak):
    """Two processes use it until one is killed; the other must go on, and nothing be lost."""
    seed = int.from_bytes(os.urandom(4), "little")
    sys.stdout.write(f"seed {seed}\n")
    rng = random.Random(seed)
    with child(lambda: live(pool.path, seed)) as survivor:
        for number in range(200 if soak else 12):
            with child(lambda n=number: live(pool.path, seed + 1 + n)) as victim:
                time.sleep(rng.uniform(0.01, 0.1))
                assert os.waitpid(victim, os.WNOHANG) == (0, 0)
            assert os.waitpid(survivor, os.WNOHANG) == (0, 0)
            out = np.zeros(64 * 4096, np.uint8)
            for key in pool.objects().keys.tolist():
                size = pool.get_into(tuple(key), out, verify=True)
                if size is not None:
                    np.testing.assert_array_equal(out[:size], content(tuple(key), size))
    check(pool)
    for key in pool.objects().keys.tolist():
        pool.retain(tuple(key), "normal")
    pool.evict(pool.capacity_bytes)
    assert pool.stats().largest_free_bytes == pool.capacity_bytes


def test_open_reclaims_resources_of_dead_processes(pool):
    """Four processes die one after the other with a put and a pin, in a pool that has four rows."""
    put(pool, KEY, 10)

    def die():
        own = ObjectPool.open(pool.path)
        held = own.pin(KEY), own.begin((8, os.getpid()), 4096)
        os.kill(os.getpid(), signal.SIGKILL)
        del held

    for _ in range(4):
        with child(die) as pid:
            os.waitpid(pid, 0)
    with ObjectPool.open(pool.path) as other:
        assert other.stats().num_processes == 2
        assert (other.stats().num_pins, other.stats().num_writing) == (0, 0)
    assert check(pool) == 1
