"""TieredStore: objects that a pool evicts are found on the disk, by Store's calls and results."""

import contextlib
import threading
import time

import numpy as np
import pytest

from mooncake_kernels.errors import ChecksumError, InvalidArgument
from mooncake_kernels.pool import ObjectPool, ObjectPut, PutResult
from mooncake_serving.store import Quota, SsdTier, Store, TieredStore, Watermark
from mooncake_serving.store.tiered.demotion import Demoter

from ..support import child, content, ended_well, eventually
from .support import PAGE, no_writes_from
from .test_tier_threads import in_threads

STORED, EXISTS, FULL = PutResult.STORED, PutResult.EXISTS, PutResult.FULL
BUCKET = 256 << 10
OBJECT = 2 * PAGE
IN_POOL = 8  # objects that it has room for
KEYS = list(range(30))


def value(key: int) -> np.ndarray:
    return content((key, 0), OBJECT)


@pytest.fixture
def opened(tmp_path):
    """Opens stores on one file, each with an empty pool, as after a restart of the host."""
    with contextlib.ExitStack() as stores:

        def open_store(num_buckets: int = 8, **options) -> TieredStore:
            tier = SsdTier(
                tmp_path / "tier", num_buckets * BUCKET, bucket_bytes=BUCKET, slot_bytes=4 * PAGE,
                retry_s=0,
            )  # fmt: skip
            options = {"namespace": "model", "min_uses": 1, **options}
            return stores.enter_context(TieredStore.create(IN_POOL * OBJECT, tier=tier, **options))

        yield open_store


def put(store: Store, *keys: int) -> list[PutResult]:
    return store.put_each(keys, [value(key) for key in keys])


def read(store: Store, *keys: int) -> list[int]:
    """Sizes of objects, each of which is what was put."""
    buffers = [np.full(OBJECT, 7, np.uint8) for _ in keys]
    sizes = store.get_into_each(keys, buffers)
    for key, buffer, size in zip(keys, buffers, sizes.tolist(), strict=True):
        np.testing.assert_array_equal(buffer, value(key) if size > 0 else np.uint8(7))
    return sizes.tolist()


def flip_in_pool(store: TieredStore, key: int) -> None:
    memory = store.pool.memory().numpy()
    at = memory.tobytes().find(value(key)[:64].tobytes())
    assert at >= 0
    memory[at + 5] ^= 1


def test_nothing_is_lost_that_was_evicted(opened):
    store = opened()
    assert put(store, *KEYS) == [STORED] * len(KEYS)
    assert store.exists_each(KEYS).all() and store.match_prefix([*KEYS, 99, 0]) == len(KEYS)
    assert store.flush()
    assert store.demotion_stats().num_written >= len(KEYS) - IN_POOL
    assert read(store, *KEYS) == [OBJECT] * len(KEYS)
    assert store.match_prefix(KEYS) == len(KEYS)
    assert store.demotion_stats().num_dropped == 0


def test_what_is_on_the_disk_is_not_written_again(opened):
    store = opened()
    put(store, *KEYS)
    for _ in range(3):
        read(store, *KEYS)
    assert store.tier.stats().user_bytes <= len(KEYS) * OBJECT


def test_after_a_restart_of_the_host(opened):
    store = opened()
    put(store, *KEYS)
    store.flush()
    there = store.tier.contains_each(store.keyspace.keys(KEYS))
    assert there.sum() >= len(KEYS) - IN_POOL
    store.close()
    store.close()
    store = opened()
    assert store.stats().num_ready == 0
    np.testing.assert_array_equal(store.exists_each(KEYS), there)
    assert [size > 0 for size in read(store, *KEYS)] == there.tolist()
    assert put(store, *KEYS) == [EXISTS if t else STORED for t in there]


def test_each_way_to_read_brings_it_into_the_pool(opened):
    store = opened()
    put(store, *KEYS)
    store.flush()
    cold = [k for k in KEYS if not store.pool.contains(store.keyspace.key(k))]
    assert len(cold) >= 4
    assert store.get(cold[0]) == value(cold[0]).tobytes()
    with store.view(cold[1]) as pinned:
        assert bytes(pinned.view) == value(cold[1]).tobytes()
    part = bytearray(100)
    assert store.get_into(cold[2], part, offset=50) == OBJECT
    assert part == value(cold[2])[50:150].tobytes()
    assert store.get_each(cold[2:4]) == [value(k).tobytes() for k in cold[2:4]]
    assert all(store.pool.contains(store.keyspace.key(k)) for k in cold[:4])
    assert store.get(999) is None and store.view(999) is None and store.get_into(999, part) is None
    assert store.get_into_each([999, cold[0]], [part, part]).tolist() == [-1, -2]


def test_named_objects_and_other_namespaces(opened):
    store = opened()
    other = Store(store.pool, namespace="other")
    assert store.put("name", b"value") is STORED
    put(store, *KEYS)
    assert store.get("name") == b"value" and store.exists("name")
    assert not other.exists("name") and not other.exists_each(KEYS).any()


def test_only_what_was_used_again_is_written(opened):
    store = opened(min_uses=2)
    put(store, 0, 1, 2)
    read(store, 1)
    assert put(store, 2) == [EXISTS]  # a use as well
    put(store, *range(10, 30))
    store.flush()
    assert store.exists_each([0, 1, 2]).tolist() == [False, True, True]
    assert store.demotion_stats().num_dropped == 0  # nobody wanted them


@pytest.mark.parametrize("quota", [None, Quota(num_objects=IN_POOL - 1)])
def test_what_other_processes_use_again_is_written(opened, quota):
    store = opened(min_uses=2, quota=quota)
    others = Store(store.pool, namespace="model")  # as of a process that has not the tier
    put(others, 0, 1, 2)
    assert others.get_each([1, 1, 2]) == [value(key).tobytes() for key in (1, 1, 2)]
    put(store, *range(10, 30))
    store.flush()
    assert store.exists_each([0, 1, 2]).tolist() == [False, True, True]
    assert read(store, 1, 2) == [OBJECT, OBJECT]


def test_a_watermark_writes_before_other_processes_evict(opened):
    store = opened()
    others = Store(store.pool, namespace="model")  # as of a process that has not the tier
    with Watermark(store, 0.75, 0.5, interval_s=0.01):
        for key in KEYS:
            assert put(others, key) == [STORED]
            assert eventually(lambda: store.stats().free_bytes >= 2 * OBJECT)
    store.flush()
    assert store.exists_each(KEYS).all() and store.demotion_stats().num_dropped == 0
    assert read(store, *KEYS) == [OBJECT] * len(KEYS)


def test_begin(opened):
    store = opened()
    for key in KEYS:
        put = store.begin(key, OBJECT)
        assert isinstance(put, ObjectPut)
        with put:
            put.view[:] = value(key)
    store.flush()
    assert read(store, *KEYS) == [OBJECT] * len(KEYS)
    assert {store.begin(key, OBJECT) for key in KEYS} == {EXISTS}


def test_removed_is_removed_from_both(opened):
    store = opened()
    put(store, *KEYS)
    assert [store.remove(key) for key in KEYS] == [True] * len(KEYS)
    store.flush()
    assert not store.exists_each(KEYS).any() and not store.remove(0)
    assert put(store, *KEYS) == [STORED] * len(KEYS)
    assert store.remove_all() == len(KEYS)
    store.flush()
    assert not store.exists_each(KEYS).any()
    store.close()
    assert not opened().exists_each(KEYS).any()


def test_retention(opened):
    store = opened()
    store.put(0, value(0), retention="soft")
    store.put(1, value(1), retention="hard")
    put(store, *range(2, IN_POOL + 2))
    assert store.pool.contains(store.keyspace.key(0))  # goes last
    put(store, *range(10, 30))
    assert store.pool.contains(store.keyspace.key(1))  # never


def test_a_full_queue_drops_and_counts(opened, monkeypatch):
    store = opened(queue_bytes=2 * OBJECT)
    goes_on = threading.Event()
    real = store.tier.put_each

    def slow(keys, values):
        assert goes_on.wait(60)
        return real(keys, values)

    monkeypatch.setattr(store.tier, "put_each", slow)
    put(store, *range(IN_POOL))
    assert all(store._demoter.offer(store.keyspace.key(k)) for k in (0, 1))
    assert put(store, *range(10, 14)) == [STORED] * 4  # without waiting for the disk
    stats = store.demotion_stats()
    assert (stats.num_queued, stats.queued_bytes, stats.num_written) == (2, 2 * OBJECT, 0)
    assert stats.num_dropped >= 1
    goes_on.set()
    assert store.flush()
    assert store.exists_each([0, 1]).all()
    gone = store.demotion_stats().num_dropped
    assert (~store.exists_each([*range(IN_POOL), *range(10, 14)])).sum() == gone


def test_readers_keep_half_of_the_pins(tmp_path, monkeypatch):
    """However many small objects there are for a disk that is slow."""
    goes_on = threading.Event()
    tier = SsdTier(tmp_path / "tier", 8 * BUCKET, bucket_bytes=BUCKET)
    real = tier.put_each
    monkeypatch.setattr(tier, "put_each", lambda *values: goes_on.wait(60) and real(*values))
    pool = ObjectPool.create(IN_POOL * OBJECT, num_pins=4)
    with TieredStore(pool, tier, min_uses=1) as store:
        put(store, *range(IN_POOL))
        store.evict(6 * OBJECT)
        stats = store.demotion_stats()
        assert (stats.num_queued, stats.num_dropped) == (2, 4)
        with store.view(0):
            assert read(store, 1, 6) == [OBJECT] * 2
            assert store.get(7) == value(7).tobytes()
        goes_on.set()
        assert store.flush() and read(store, 0, 1) == [OBJECT] * 2


def test_what_is_queued_counts_as_evicted_and_not_as_used(opened, monkeypatch):
    """The next look queues nothing else, unless a put finds no room."""
    store, goes_on = opened(), threading.Event()
    real = store.tier.put_each
    monkeypatch.setattr(store.tier, "put_each", lambda *values: goes_on.wait(60) and real(*values))
    put(store, *range(IN_POOL))
    before = store.pool.objects()
    for _ in range(3):
        assert len(store.evict(2 * OBJECT).keys) == 0
        assert store.demotion_stats().num_queued == 2
    assert store.pool.objects().recency.tolist() == before.recency.tolist()
    writer = threading.Thread(target=put, args=(store, 10))
    writer.start()
    assert eventually(lambda: store.demotion_stats().num_queued == 3)
    goes_on.set()
    writer.join()
    assert store.flush() and store.demotion_stats().num_dropped == 0
    in_pool = store.pool.contains_each(store.keyspace.keys([*range(IN_POOL), 10]))
    assert in_pool.tolist() == [*[True] * 5, *[False] * 3, True]  # the tail goes first


def test_a_disk_that_fails_makes_it_a_store_without_one(opened):
    store = opened()
    with no_writes_from(0):
        assert put(store, *KEYS) == [STORED] * len(KEYS)
        store.flush()
        stats = store.demotion_stats()
        assert stats.num_dropped == len(KEYS) - store.stats().num_ready
        assert store.tier.stats().num_objects == 0 and store.tier.stats().error
    assert put(store, *range(100, 130)) == [STORED] * 30
    store.flush()
    assert store.exists_each(range(100, 130)).all()


def test_damaged_on_the_disk(opened, tmp_path):
    store = opened()
    put(store, *KEYS)
    store.flush()
    first, second, *_ = cold = [k for k in KEYS if not store.pool.contains(store.keyspace.key(k))]
    records = [store.tier._index.find(store.keyspace.key(k)).record for k in (first, second)]
    store.close()
    with open(tmp_path / "tier", "r+b") as file:
        for record in records:
            file.seek(record.offset + PAGE + 11)
            file.write(b"\0\1\2")
    store = opened()
    with pytest.raises(ChecksumError, match="is not what its checksum says"):
        store.get(first)
    assert not store.exists(first) and store.get(first) is None
    buffers = [bytearray(OBJECT) for _ in range(3)]
    sizes = store.get_into_each([second, cold[2], first], buffers)
    assert sizes.tolist() == [-4, OBJECT, -1] and not store.exists(second)
    assert put(store, first) == [STORED]


def test_what_is_damaged_in_the_pool_does_not_get_to_the_disk(opened):
    store = opened()
    put(store, *range(IN_POOL))
    flip_in_pool(store, 0)
    put(store, *range(10, 10 + IN_POOL))
    store.flush()
    assert store.exists_each([0, 1, 2]).tolist() == [False, True, True]
    assert store.demotion_stats().num_dropped == 1


READS = {
    "get": lambda store, key: store.get(key),
    "get_each": lambda store, key: store.get_each([key])[0],
    "view": lambda store, key: closed(store.view(key)),
    "get_into": lambda store, key: into(lambda b: store.get_into(key, b)),
    "get_into_each": lambda store, key: into(lambda b: store.get_into_each([key], [b])[0]),
}


def closed(pinned) -> bytes:
    with pinned:
        return pinned.to_bytes()


def into(read) -> bytes:
    buffer = bytearray(OBJECT)
    if (size := read(buffer)) == -4:
        raise ChecksumError("-4")
    assert size == OBJECT
    return bytes(buffer)


@pytest.mark.parametrize("name", READS)
def test_damaged_in_the_pool_it_is_read_from_the_disk(opened, name):
    store = opened(verify=1.0)
    put(store, *KEYS)
    store.flush()
    read(store, 0)
    flip_in_pool(store, 0)
    assert READS[name](store, 0) == value(0).tobytes()
    assert store.get(0) == value(0).tobytes()


@pytest.mark.parametrize("name", READS)
def test_damaged_in_the_pool_and_on_the_disk(opened, tmp_path, name):
    store = opened(verify=1.0)
    put(store, *KEYS)
    store.flush()
    read(store, 0)
    flip_in_pool(store, 0)
    content_of = bytearray((tmp_path / "tier").read_bytes())
    at = content_of.find(value(0)[:64].tobytes())
    with open(tmp_path / "tier", "r+b") as file:
        file.seek(at + 9)
        file.write(bytes([content_of[at + 9] ^ 1]))
    with pytest.raises(ChecksumError):
        READS[name](store, 0)
    assert not store.exists(0) and store.get(0) is None


def test_damaged_in_the_pool_and_not_on_the_disk(opened):
    store = opened(verify=1.0)
    put(store, 0)
    flip_in_pool(store, 0)
    with pytest.raises(ChecksumError):
        store.get(0)
    assert store.get(0) is None


@pytest.mark.parametrize("key", [None, 1.5, -1, 2**64, [], [1], {}, np.zeros(2)])
def test_what_is_no_key(opened, key):
    store = opened()
    for call in (store.get, store.view, store.remove, lambda key: store.put(key, b"x")):
        with pytest.raises(InvalidArgument, match="key must be a name or an integer from 0 to"):
            call(key)


@pytest.mark.parametrize("num_bytes", [None, "x", 1.5, -1, 2**64, []])
def test_no_number_of_bytes_to_evict(opened, num_bytes):
    with pytest.raises(InvalidArgument, match="evict: num_bytes must be an integer in 0 to"):
        opened().evict(num_bytes)


def test_without_room_in_the_pool_it_is_read_past_it(opened):
    store = opened()
    put(store, *KEYS)
    store.flush()
    cold = [k for k in KEYS if not store.pool.contains(store.keyspace.key(k))]
    with contextlib.ExitStack() as pins:
        for key in KEYS:
            if key not in cold:
                pins.enter_context(store.view(key))
        assert store.put(1000, value(1000)) is FULL
        assert read(store, *cold[:5]) == [OBJECT] * 5
        assert store.get(cold[0]) == value(cold[0]).tobytes() and store.view(cold[0]) is None
        parts = [bytearray(100), bytearray(OBJECT)]
        assert store.get_into(cold[1], *parts) == OBJECT
        assert (parts[0] + parts[1])[:OBJECT] == value(cold[1]).tobytes()
        assert store.get_into(cold[2], parts[0], offset=50) == OBJECT
        assert parts[0] == value(cold[2])[50:150].tobytes()
        with pytest.raises(InvalidArgument, match="must have room for 8192 bytes, got 100"):
            store.get_into(cold[1], parts[0])
        with pytest.raises(InvalidArgument, match="the object's 8192 bytes, got 100 from 8100"):
            store.get_into(cold[1], parts[0], offset=8100)


def test_what_comes_back_stays_within_the_quota(opened):
    store = opened()
    put(store, *KEYS)
    store.flush()
    store.close()
    limit = 3 * OBJECT
    store = opened(quota=Quota(num_bytes=limit))
    there = [k for k in KEYS if store.exists(k)]
    assert len(there) > IN_POOL
    for key in there:
        assert store.get(key) == value(key).tobytes()
        assert store.usage().num_bytes <= limit
    with contextlib.ExitStack() as pins:
        for key in there[:3]:
            pins.enter_context(store.view(key))
        assert read(store, *there) == [OBJECT] * len(there)
        assert store.get(there[4]) == value(there[4]).tobytes()
        assert store.usage().num_bytes <= limit


def test_what_a_quota_evicts_goes_to_the_disk(opened):
    """Written before it goes, if it is worth that; the put waits, and is within the quota."""
    limit = 3 * OBJECT
    store = opened(quota=Quota(num_bytes=limit))
    other = Store(store.pool, namespace="other")
    assert other.put(1, value(1)) is STORED
    for key in KEYS[:12]:
        assert put(store, key) == [STORED]
        assert store.usage().num_bytes <= limit
    assert store.demotion_stats().num_written == 9
    assert read(store, *KEYS[:12]) == [OBJECT] * 12
    assert other.get(1) == value(1).tobytes()
    assert store.usage().num_bytes <= limit
    assert store.pool.stats().num_pins == 0

    store.close()
    store = opened(quota=Quota(num_bytes=limit), min_uses=2)
    new = [100 + key for key in KEYS[:12]]
    assert put(store, *new) == [STORED] * 12
    assert store.exists_each(new).tolist() == [False] * 9 + [True] * 3


def test_a_quota_whose_disk_fails(opened):
    store = opened(quota=Quota(num_bytes=3 * OBJECT))
    with no_writes_from(0):
        assert put(store, *KEYS[:12]) == [STORED] * 12
    assert store.usage().num_bytes <= 3 * OBJECT
    assert store.demotion_stats().num_dropped == 9


def test_who_reads_what_another_brings_up_waits_for_it(opened, monkeypatch):
    store = opened()
    put(store, *KEYS)
    store.flush()
    cold = next(k for k in KEYS if not store.pool.contains(store.keyspace.key(k)))
    begun, goes_on = threading.Event(), threading.Event()
    real = store.tier.get_into_each

    def slow(*args, **options):
        begun.set()
        assert goes_on.wait(60)
        return real(*args, **options)

    monkeypatch.setattr(store.tier, "get_into_each", slow)
    results = []

    def look():
        with store.view(cold) as pinned:
            results.append(bytes(pinned.view))

    lives = [threading.Thread(target=look)]
    lives[0].start()
    assert begun.wait(60)
    lives += [threading.Thread(target=lambda: results.append(store.get(cold))) for _ in range(2)]
    lives += [threading.Thread(target=look)]
    for life in lives[1:]:
        life.start()
    goes_on.set()
    for life in lives:
        life.join()
    assert results == [value(cold).tobytes()] * 4


def test_threads_that_read_the_same_all_get_it(opened):
    store = opened()
    put(store, *KEYS)
    store.flush()
    there = [k for k in KEYS if store.tier.contains_each(store.keyspace.keys([k]))[0]]
    gate = threading.Barrier(3)

    def life():
        for key in there:
            gate.wait(60)
            assert store.get(key) == value(key).tobytes()

    in_threads(life, life, life)


def test_what_was_removed_does_not_come_back(opened, soak):
    """While others evict it, and bring it up."""
    store = opened()
    done = threading.Event()

    def evict():
        while not done.is_set():
            store.evict(IN_POOL * OBJECT)

    def remove():
        try:
            for key in range(2000 if soak else 200):
                put(store, key)
                assert store.remove(key)
                assert not store.exists(key) and store.get(key) is None
                if key % 20 == 0:
                    put(store, key, key + 10_000)
                    store.remove_all()
                    assert not store.exists_each([key, key + 10_000]).any()
        finally:
            done.set()

    def look():
        chance = np.random.default_rng(1)
        while not done.is_set():
            key = int(chance.integers(0, 200))
            assert store.get(key) in (None, value(key).tobytes())

    in_threads(evict, remove, look)
    store.flush()
    assert not store.exists_each(range(200)).any()


@pytest.mark.parametrize("call", [Store.put_key, Store.begin_key], ids=["put", "begin"])
@pytest.mark.parametrize("look", [0, 1])
def test_what_moves_to_the_disk_after_a_look_there_exists(opened, monkeypatch, call, look):
    """A put looks at the disk, where the object is not yet, and then at the pool."""
    store = opened()
    put(store, 0)
    key, real, num_looks = store.keyspace.key(0), store.tier.contains_each, 0

    def contains_each(keys):
        nonlocal num_looks
        found = real(keys)
        num_looks += 1
        if num_looks == look + 1:
            assert store._demoter.offer(key)
            assert eventually(lambda: real(keys).all())
            time.sleep(0.05)  # for the demoter to evict it, if it may
        return found

    monkeypatch.setattr(store.tier, "contains_each", contains_each)
    name = call.__name__
    assert getattr(store, name)(key, b"other" if name == "put_key" else 5) is EXISTS
    assert num_looks > look and store.flush()
    assert store.get(0) == value(0).tobytes()


@pytest.fixture
def slow(opened, monkeypatch):
    """A store whose object 0 is being written to the disk until the event is set."""
    store, begun, goes_on = opened(), threading.Event(), threading.Event()
    real = store.tier.put_each

    def put_each(keys, values):
        begun.set()
        assert goes_on.wait(60)
        return real(keys, values)

    monkeypatch.setattr(store.tier, "put_each", put_each)
    put(store, 0)
    assert store._demoter.offer(store.keyspace.key(0)) and begun.wait(60)
    yield store, goes_on
    goes_on.set()


@pytest.mark.parametrize("who", ["this store", "another process"])
def test_what_is_removed_and_put_anew_while_it_is_written_stays(slow, who):
    store, goes_on = slow
    others = Store(store.pool, namespace="model")  # as of a process that has not the tier
    assert others.remove(0)
    assert (store if who == "this store" else others).put(0, b"other") is STORED
    goes_on.set()
    assert store.flush() and store.get(0) == b"other"
    store.evict(IN_POOL * OBJECT)
    assert store.flush() and store.get(0) == b"other"


def test_what_another_process_removes_while_it_is_written_is_gone(slow):
    store, goes_on = slow
    assert Store(store.pool, namespace="model").remove(0)
    goes_on.set()
    assert store.flush() and not store.exists(0)


def test_it_is_told_what_went_from_both(opened):
    """What the disk could not take, and not what it has."""
    store, told = opened(), set()
    store.on_evicted.append(lambda keys: told.update(keys[:, 0].tolist()))
    put(store, *KEYS)
    store.flush()
    read(store, *KEYS)
    assert told == set() and store.exists_each(KEYS).all()
    new = range(100, 130)
    with no_writes_from(0):
        put(store, *new)
        store.flush()
    assert told == {key for key in new if not store.exists(key)} and len(told) >= 30 - IN_POOL


def test_who_waits_for_room_goes_on_if_what_was_queued_is_removed(opened, monkeypatch):
    goes_on, real = threading.Event(), Demoter._take

    def take(demoter):
        assert goes_on.wait(60)
        return real(demoter)

    monkeypatch.setattr(Demoter, "_take", take)
    store = opened()
    put(store, 0)
    assert store._demoter.offer(store.keyspace.key(0))
    waits = threading.Thread(target=store._demoter.wait_written)
    waits.start()
    time.sleep(0.05)  # until it does
    assert store.remove(0)
    waits.join(10)
    is_waiting = waits.is_alive()
    put(store, 1)
    assert store._demoter.offer(store.keyspace.key(1))
    goes_on.set()
    assert not is_waiting


def test_close_gives_up_in_time(opened, monkeypatch):
    store = opened(close_deadline_s=0.05)
    goes_on, waits = threading.Event(), threading.Event()
    real = store.tier.put_each

    def slow(keys, values):
        waits.set()
        assert goes_on.wait(60)
        return real(keys, values)

    monkeypatch.setattr(store.tier, "put_each", slow)
    put(store, *range(6))
    assert store._demoter.offer(store.keyspace.key(0)) and waits.wait(60)
    assert all(store._demoter.offer(store.keyspace.key(k)) for k in range(1, 6))
    closer = threading.Thread(target=store.close)
    closer.start()
    while store.demotion_stats().num_dropped < 5:
        assert closer.is_alive()  # what is being written ends first
    goes_on.set()
    closer.join()
    assert store.demotion_stats().num_written == 1
    assert opened().exists_each(range(6)).tolist() == [True, *[False] * 5]


def test_threads(opened, soak):
    """Each thread puts and reads keys of all: what is there is what was put."""
    store = opened(num_buckets=4)

    def life(number):
        chance = np.random.default_rng(number)
        for _ in range(400 if soak else 40):
            keys = chance.integers(0, 40, 5).tolist()
            results = put(store, *dict.fromkeys(keys))
            assert set(results) <= {STORED, EXISTS, PutResult.BEING_WRITTEN, FULL}
            assert set(read(store, *keys)) <= {OBJECT, -1}
            if chance.random() < 0.1:
                store.remove(keys[0])

    in_threads(*(lambda i=i: life(i) for i in range(3)))
    assert store.flush()
    stats = store.stats()
    assert (stats.num_writing, stats.num_pins, stats.num_doomed) == (0, 0, 0)
    assert store.tier.stats().num_damaged == store.tier.stats().num_write_errors == 0


@pytest.mark.parametrize(
    "options,message",
    [
        ({"eviction": None}, "eviction must not be given"),
        ({"min_uses": 0}, "min_uses must be at least 1, got 0"),
        ({"queue_bytes": "1"}, "queue_bytes must be at least 1, got '1'"),
        ({"verify": 2}, "verify must be from 0 to 1, got 2"),
        ({"close_deadline_s": "x"}, "close_deadline_s must be a number from 0 on, got 'x'"),
    ],
)
def test_wrong_options(opened, options, message):
    before = set(threading.enumerate())
    with pytest.raises(InvalidArgument, match=message):
        opened(**options)
    assert set(threading.enumerate()) <= before
    assert put(opened(), 0) == [STORED]  # nobody has the file open


def test_a_store_without_a_tier():
    with pytest.raises(InvalidArgument, match="tier must be an SsdTier, got None"):
        TieredStore.create(IN_POOL * OBJECT, tier=None)


def test_a_forked_child_does_not_close_it(opened):
    store = opened(watermark=(0.9, 0.5))
    put(store, *KEYS)
    with child(store.close) as pid:
        assert ended_well(pid)
    assert store.flush()
    assert store.exists_each(KEYS).all() and read(store, *KEYS) == [OBJECT] * len(KEYS)
