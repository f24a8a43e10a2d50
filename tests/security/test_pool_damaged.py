"""The memory of a pool says anything: each call ends with an error or without, and no process dies.

Each damaged pool is used by a process of its own. ``--soak`` makes it 3000 random ones instead of
150.
"""

import contextlib
import os
import random
import resource
import signal
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

import mooncake_kernels as mk
from mooncake_kernels.errors import PoolDamaged, Unavailable
from mooncake_kernels.pool import ObjectPool, PutResult

NUM_OBJECTS, NUM_PROCESSES, NUM_PINS = 64, 4, 16
ALLOWED_S = 60  # of processor time, for what takes milliseconds

# Where docs/internals/pool.md has the parts, in bytes.
GEOMETRY = {
    "capacity": 16, "alignment": 24, "num_units": 28, "num_entries": 32, "num_buckets": 36,
    "num_rows": 40, "num_slots": 44, "device": 48,
}  # fmt: skip
MUTEX, MUTEX_END = 1728, 1776
ROWS = 5632
BUCKETS = ROWS + 64 * NUM_PROCESSES + 8 * NUM_PROCESSES * NUM_PINS
ENTRIES = BUCKETS + 8 * NUM_OBJECTS
SPANS_END = ENTRIES + (64 + 8 + 16 + 4) * NUM_OBJECTS + 28 * (2 * NUM_OBJECTS + 1)


@pytest.fixture
def image(tmp_path):
    """The bytes of a pool with some objects, and the path where one is to be put."""
    path = Path(f"/dev/shm/mk-test-{os.getpid()}-{tmp_path.name}")
    with ObjectPool.create(
        1 << 20, path, num_objects=NUM_OBJECTS, num_processes=NUM_PROCESSES, num_pins=NUM_PINS
    ) as pool:
        for i in range(30):
            retention = ("normal", "soft", "hard")[i % 3]
            pool.put_from((i + 1, 1), np.full(1000 * i, i, np.uint8), retention=retention)
        pool.remove((5, 1))
    yield bytearray(path.read_bytes()), path
    path.unlink()


def use(path: Path) -> None:
    """Call everything; what a call raises is its own."""
    pool = ObjectPool.open(path)
    watch = pool.watch()
    keys = np.array([(i + 1, 1) for i in range(40)], np.uint64)
    buffer = bytearray(40_000)
    calls = [
        lambda: pool.contains_each(keys, or_written=True),
        lambda: pool.match_prefix(keys),
        lambda: pool.ids_of(keys),
        watch.look,
        *(lambda key=key: pool.get_into(key, buffer, verify=True) for key in keys.tolist()),
        lambda: [pool.pin(key).to_bytes() for key in keys[:4].tolist()],
        pool.stats,
        pool.objects,
        pool.quotas,
        lambda: pool.order_uses(keys),
        lambda: pool.retain((7, 1), "hard"),
        lambda: pool.victims(100_000, "lru"),
        lambda: pool.victims(100_000, "sieve"),
        lambda: pool.evict(50_000, "sieve"),
        lambda: pool.put_from((999, 1), bytes(5000)),
        lambda: pool.remove((3, 1)),
        lambda: pool.remove_each(keys[8:12]),
        lambda: pool.evict_keys(keys[12:20]),
        lambda: pool.evict(1 << 40, "lru"),
        lambda: pool.put_from((998, 1), bytes(300_000)),
        pool.reap,
        pool.counts,
        watch.look,
    ]
    for call in calls:
        with contextlib.suppress(PoolDamaged, ValueError, RuntimeError, OSError, AttributeError):
            call()


def outcome(path: Path, data: bytes) -> str:
    """What becomes of a process that uses a pool of these bytes."""
    path.write_bytes(data)
    path.chmod(0o600)
    pid = os.fork()
    if pid == 0:
        resource.setrlimit(resource.RLIMIT_CPU, (ALLOWED_S, ALLOWED_S))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        try:
            use(path)
        except (ValueError, Unavailable):
            os._exit(1)
        except BaseException:  # noqa: BLE001 - the child must not return
            os._exit(2)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return ("used", "refused", "another error")[os.WEXITSTATUS(status)]


@pytest.mark.parametrize("name", GEOMETRY)
@pytest.mark.parametrize("value", [0, 1, 0x7FFFFFFF, 0xFFFFFFFF, 0x40000000])
def test_invalid_header_sizes_are_rejected(image, name, value):
    data, path = image
    struct.pack_into("<I", data, GEOMETRY[name], value)
    # Of a pool with fewer processes the other parts would be elsewhere, but within the file.
    is_possible = (name, value) == ("device", 0xFFFFFFFF) or (
        name in ("num_buckets", "num_rows", "num_slots") and value == 1
    )
    assert outcome(path, data) == ("used" if is_possible else "refused")


def test_damaged_header_error_message(image):
    data, path = image
    struct.pack_into("<I", data, GEOMETRY["alignment"], 0)
    path.write_bytes(data)
    message = f"^the pool {path} is damaged: its header has sizes that no pool has$"
    with pytest.raises(mk.PoolDamaged, match=message):
        ObjectPool.open(path)


@pytest.mark.parametrize("part", [(96, MUTEX), (MUTEX_END, ROWS), (ROWS, BUCKETS),
                                  (BUCKETS, ENTRIES), (ENTRIES, SPANS_END)])  # fmt: skip
def test_random_corruption_is_contained(image, part, soak):
    data, path = image
    random_ = random.Random(part[0])
    outcomes: Counter[str] = Counter()
    for _ in range(600 if soak else 30):
        changed = bytearray(data)
        for _ in range(random_.randrange(1, 8)):
            value = random_.choice([0, 2**32 - 1, random_.getrandbits(32), random_.randrange(256)])
            struct.pack_into("<I", changed, random_.randrange(part[0], part[1] - 4), value)
        outcomes[outcome(path, changed)] += 1
    assert set(outcomes) <= {"used", "refused"}, outcomes


def test_derived_lists_are_rebuilt_from_objects(image):
    """Of the lists and orders nothing is left, and no object is lost."""
    data, path = image
    orders = ENTRIES + 64 * NUM_OBJECTS
    data[orders:SPANS_END] = bytes(SPANS_END - orders)
    data[BUCKETS:ENTRIES] = b"\x07\0\0\0\0\0\0\0" * NUM_OBJECTS
    path.write_bytes(data)
    with ObjectPool.open(path) as pool:
        with pytest.raises(PoolDamaged):
            for i in range(30):
                pool.remove((i + 1, 1))
                pool.evict(1)
        num_ready = pool.stats().num_ready
        assert pool.stats().num_repairs == 1 and num_ready >= 20
        assert pool.match_prefix(pool.objects().keys) == num_ready
        assert pool.put_from((99, 1), bytes(5000)) is PutResult.STORED
        evicted = len(pool.evict(1 << 40).keys)
        assert pool.stats().num_ready == num_ready + 1 - evicted
        assert pool.stats().num_ready == (pool.objects().retention == 2).sum()


def test_object_outside_the_pool_is_reported_as_damage(image):
    data, path = image
    with ObjectPool.open(path) as pool:
        numbers = (pool.ids_of([(i + 1, 1) for i in range(30)]) - 1) & 0xFFFFFFFF
    for entry in numbers[[9, 19]].tolist():
        assert struct.unpack_from("<Q", data, ENTRIES + 64 * entry + 8)[0] in (10, 20)
        struct.pack_into("<I", data, ENTRIES + 64 * entry + 56, 2**32 - 5)  # its first unit
    path.write_bytes(data)
    with ObjectPool.open(path) as pool:
        for call in (pool.pin, lambda key: pool.get_into(key, bytearray(1 << 20))):
            with pytest.raises(PoolDamaged, match="is damaged: an object reaches out of it$"):
                call((10, 1))
        assert pool.pin((9, 1)).to_bytes() == bytes([8]) * 8000
        with pytest.raises(PoolDamaged):  # nothing can be added to what contradicts itself
            pool.put_from((99, 1), b"x")


def test_invalid_mutex_is_reported_as_damage(image):
    data, path = image
    struct.pack_into("<I", data, MUTEX + 16, 0x20)  # of another kind: with the holder's priority
    path.write_bytes(data)
    with pytest.raises(PoolDamaged, match="is damaged: its mutex is none$"):
        ObjectPool.open(path)


def test_mutex_held_by_nonexistent_thread_times_out(image):
    _, path = image
    with ObjectPool.open(path) as pool:
        with path.open("r+b") as file:
            file.seek(MUTEX)
            file.write(struct.pack("<I", 4_000_000))  # more than there are processes
        with pytest.raises(TimeoutError):
            pool.stats(timeout_s=0.1)
        assert pool.get_into((9, 1), bytearray(8000)) == 8000
        with path.open("r+b") as file:
            file.seek(MUTEX)
            file.write(bytes(4))
        assert pool.stats().num_ready == 29
