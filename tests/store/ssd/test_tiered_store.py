"""TieredStore: objects that a pool evicts are found on the disk, by Store's calls and results."""

import contextlib
import threading

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import ObjectPool, ObjectPut
from mooncake_serving.store import Quota, SsdTier, Store, TieredStore, Watermark

from ..support import EXISTS, FULL, STORED, child, ended_well, eventually
from .support import PAGE, no_writes_from
from .tiered import BUCKET, IN_POOL, KEYS, OBJECT, put, read, to_disk, value


def test_object_on_disk_is_not_rewritten(opened):
    store = opened()
    put(store, *KEYS)
    for _ in range(3):
        read(store, *KEYS)
    assert store.tier.stats().user_bytes <= len(KEYS) * OBJECT


def test_invalid_values_and_buffers_are_named_before_any_copy(opened):
    store = opened()
    too_large = bytes(store.pool.capacity_bytes + 1)
    for values, place in (([b"a", "text"], 1), ([b"a", b"b", too_large], 2)):
        with pytest.raises(InvalidArgument, match=rf"^put_each: values\[{place}\] must be "):
            store.put_each(range(len(values)), values)
    assert not store.exists_each(range(3)).any()
    put(store, *KEYS)
    assert store.flush()
    buffers = [bytearray(OBJECT) for _ in KEYS]
    with pytest.raises(InvalidArgument, match=r"^get_into_each: buffers\[1\] must be writable"):
        store.get_into_each(KEYS, [buffers[0], b"", *buffers[2:]])
    assert not any(map(any, buffers))


def test_objects_on_disk_survive_a_host_restart(opened):
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


def test_every_read_call_promotes_into_the_pool(opened):
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


def test_disk_with_room_admits_everything(opened):
    """Also what was seen once, by default; none is lost but by its own fault."""
    store = opened(num_buckets=64, min_uses=2)
    assert put(store, *range(600)) == [STORED] * 600
    assert store.flush() and store.exists_each(range(600)).all()
    stats = store.demotion_stats()
    assert (stats.num_written, stats.num_dropped) == (600 - store.stats().num_ready, 0)
    assert store.tier.stats().num_free_buckets > 1 and store.tier.stats().num_dropped == 0


@pytest.mark.parametrize("queue_bytes", [OBJECT, 64 * OBJECT])
def test_full_disk_keeps_its_objects(opened, queue_bytes):
    """Then what was used once does not push out what is there; each that is lost is counted."""
    store = opened(num_buckets=3, min_uses=2, queue_bytes=queue_bytes)
    num_put = 0
    while store.demotion_stats().num_unadmitted < 20:
        assert put(store, num_put) == [STORED]
        num_put += 1
        assert num_put < 500
    assert store.flush()
    stats, disk = store.demotion_stats(), store.tier.stats()
    assert disk.num_dropped == 0 and disk.num_objects == stats.num_written > 30
    there = store.exists_each(range(num_put)).sum()
    assert there == num_put - stats.num_unadmitted - stats.num_queue_full
    assert store.tier.room_bytes < 2 * (OBJECT + 2 * PAGE)
    # What is used again is worth more than what is there.
    again = num_put - 1
    assert read(store, again) == [OBJECT] and put(store, *range(1000, 1020)) == [STORED] * 20
    assert store.flush() and store.exists(again) and store.tier.stats().num_dropped > 0


def test_free_room_is_known_after_a_restart(opened):
    store = opened(num_buckets=3)
    put(store, *range(IN_POOL + 8))
    assert store.flush()
    room_bytes = store.tier.room_bytes
    store.close()
    store = opened(num_buckets=3)
    assert store.tier.room_bytes == room_bytes
    store.remove_all()
    assert store.tier.room_bytes > room_bytes + 8 * OBJECT


@pytest.mark.parametrize("quota", [None, Quota(num_objects=IN_POOL - 1)])
@pytest.mark.usefixtures("full_disk")
def test_objects_reused_by_other_processes_are_written(opened, quota):
    store = opened(min_uses=2, quota=quota)
    others = Store(store.pool, namespace="model")  # as of a process that has not the tier
    put(others, 0, 1, 2)
    assert others.get_each([1, 1, 2]) == [value(key).tobytes() for key in (1, 1, 2)]
    put(store, *range(10, 30))
    store.flush()
    assert store.exists_each([0, 1, 2]).tolist() == [False, True, True]
    assert read(store, 1, 2) == [OBJECT, OBJECT]


def test_watermark_demotes_before_other_processes_evict(opened):
    store = opened()
    others = Store(store.pool, namespace="model")  # as of a process that has not the tier
    with Watermark(store, 0.75, 0.5, interval_s=0.01):
        for key in KEYS:
            assert put(others, key) == [STORED]
            eventually(lambda: store.stats().free_bytes >= 2 * OBJECT)
    store.flush()
    assert store.exists_each(KEYS).all() and store.demotion_stats().num_dropped == 0
    assert read(store, *KEYS) == [OBJECT] * len(KEYS)


def test_pinned_objects_are_skipped_by_eviction(opened, full_disk):
    store = opened(min_uses=2)
    put(store, *range(IN_POOL))
    coldest = store.keyspace.keys(range(IN_POOL))[::-1][:4]
    with contextlib.ExitStack() as readers:
        for key in coldest.tolist():
            readers.enter_context(store.pool.pin(tuple(key), touch=False))
        assert store.evict(2 * OBJECT).num_bytes == 2 * OBJECT
        assert store.exists_each(range(IN_POOL)).tolist() == [True] * 2 + [False] * 2 + [True] * 4
        assert store.evict(IN_POOL * OBJECT).num_bytes == 2 * OBJECT
        assert store.demotion_stats().num_unadmitted == 4  # what is being read, is not dropped


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


def test_remove_removes_from_both_tiers(opened):
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


@pytest.mark.parametrize("min_uses", [1, 2])
@pytest.mark.usefixtures("full_disk")
def test_a_full_index_evicts_a_share_of_the_objects(tmp_path, min_uses):
    tier = SsdTier(tmp_path / "tier", 8 * BUCKET, bucket_bytes=BUCKET)
    pool = ObjectPool.create(1 << 20, num_objects=20)
    with TieredStore(pool, tier, min_uses=min_uses, evict_ratio=0.1) as store:
        for key in range(100):
            assert store.put(key, bytes(100)) is STORED
            assert store.flush() and min(key + 1, 19) <= store.stats().num_ready <= 20
        assert store.exists_each(range(100)).all() == (min_uses == 1)
        assert store.tier.stats().num_objects == (80 if min_uses == 1 else 0)


def test_put_blocked_by_hard_objects_evicts_nothing(opened):
    store = opened()
    for key in range(IN_POOL):
        store.put(key, value(key), retention="hard" if key < 5 else "normal")
    assert store.put(9, bytes(4 * OBJECT)) is FULL
    assert store.flush()
    assert store.pool.contains_each(store.keyspace.keys(range(IN_POOL))).all()
    assert store.put(9, bytes(3 * OBJECT)) is STORED


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
        assert (stats.num_queued, stats.num_queue_full) == (2, 4)
        with store.view(0):
            assert read(store, 1, 6) == [OBJECT] * 2
            assert store.get(7) == value(7).tobytes()
        goes_on.set()
        assert store.flush() and read(store, 0, 1) == [OBJECT] * 2


def test_failed_disk_degrades_to_a_plain_store(opened):
    store = opened()
    with no_writes_from(0):
        assert put(store, *KEYS) == [STORED] * len(KEYS)
        store.flush()
        stats = store.demotion_stats()
        assert stats.num_dropped == stats.num_unwritten == len(KEYS) - store.stats().num_ready
        assert store.tier.stats().num_objects == 0 and store.tier.stats().error
    assert put(store, *range(100, 130)) == [STORED] * 30
    store.flush()
    assert store.exists_each(range(100, 130)).all()


def test_objects_are_read_from_disk_past_a_full_pool(opened):
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


def test_promotion_stays_within_the_quota(opened):
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


def test_objects_evicted_for_a_quota_go_to_disk(opened, full_disk):
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


def test_quota_holds_when_the_disk_fails(opened):
    store = opened(quota=Quota(num_bytes=3 * OBJECT))
    with no_writes_from(0):
        assert put(store, *KEYS[:12]) == [STORED] * 12
    assert store.usage().num_bytes <= 3 * OBJECT
    assert store.demotion_stats().num_dropped == 9


@pytest.mark.parametrize(
    "options,message",
    [
        ({"eviction": "lru"}, "eviction must be a function, as lru is, got 'lru'"),
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
    assert put(opened(), 0) == [STORED]  # no one has the file open


def test_failed_create_or_open_closes_the_tier(tmp_path):
    path = tmp_path / "pool"
    path.write_bytes(b"something else")
    calls = [
        (FileExistsError, lambda tier: TieredStore.create(IN_POOL * OBJECT, path, tier=tier)),
        (InvalidArgument, lambda tier: TieredStore.open(path, tier=tier)),
    ]
    for error, call in calls:
        tier = SsdTier(tmp_path / "tier", 8 * BUCKET, bucket_bytes=BUCKET)
        with pytest.raises(error, match="pool"):
            call(tier)
        with SsdTier(tmp_path / "tier", 8 * BUCKET, bucket_bytes=BUCKET):
            pass  # no one has the file open


def test_a_pool_has_one_tiered_store_at_a_time(tmp_path):
    path = tmp_path / "pool"
    ObjectPool.create(IN_POOL * OBJECT, path).close()
    with contextlib.ExitStack() as stores:

        def open_store(name: str) -> Store:
            tier = SsdTier(tmp_path / name, 4 * BUCKET, bucket_bytes=BUCKET)
            return stores.enter_context(TieredStore.open(path, tier=tier))

        first = open_store("first")
        with pytest.raises(Unavailable, match="another one has a disk behind the pool"):
            open_store("second")
        with Store.open(path, watermark=(0.9, 0.8)) as other:  # locks the file in its own way
            assert other.put("a", b"1") == STORED and first.get("a") == b"1"
        with pytest.raises(Unavailable):  # closing the file elsewhere does not end it
            open_store("second")
        first.close()
        assert open_store("second").get("a") == b"1"


def test_sizes_and_starts_of_both_tiers(opened):
    store = opened()
    put(store, 0, 1)
    keys = store.keyspace.keys([0, 1, 2])
    to_disk(store, 0)
    assert [store.num_bytes(key) for key in (0, 1, 2)] == [OBJECT, OBJECT, None]
    starts = [value(0).tobytes()[:10], value(1).tobytes()[:10], b""]
    assert store.read_starts(keys, 10) == starts
    assert store.pool.contains_each(keys).tolist() == [False, True, False]  # nothing was read


def test_missing_tier_is_rejected():
    with pytest.raises(InvalidArgument, match="tier must be an SsdTier, got None"):
        TieredStore.create(IN_POOL * OBJECT, tier=None)


def test_forked_child_does_not_close_the_store(opened):
    store = opened(watermark=(0.9, 0.5))
    put(store, *KEYS)
    with child(store.close) as pid:
        assert ended_well(pid)
    assert store.flush()
    assert store.exists_each(KEYS).all() and read(store, *KEYS) == [OBJECT] * len(KEYS)


def test_hidden_objects_are_gone_and_recorded(opened):
    store = opened()
    put(store, *KEYS)
    assert store.flush()
    on_disk, num_bytes = store.on_disk()
    assert set(num_bytes.tolist()) == {OBJECT} and len(on_disk) >= len(KEYS) - IN_POOL
    words, num_written = store.keyspace.keys(KEYS), store.tier.stats().written_bytes
    store.hide_keys(words[:-1])
    assert not store.exists_each(KEYS[:-1]).any() and store.exists(KEYS[-1])
    assert store.tier.stats().num_objects and store.tier.stats().written_bytes == num_written
    store.evict(store.pool.capacity_bytes)
    assert store.flush() and store.tier.stats().num_objects == 1  # what was written
    assert put(store, KEYS[0]) == [STORED] and store.exists(KEYS[0])
    store.hide_keys(words)
    store.record_hidden()
    assert store.tier.stats().num_objects == 0 and not store.exists_each(KEYS).any()
    assert put(store, *KEYS) == [STORED] * len(KEYS)


def test_bring_up_evicts_nothing(opened):
    store = opened()
    put(store, *KEYS)
    assert store.flush()
    words = store.keyspace.keys(KEYS)
    in_pool = store.pool.contains_each(words)
    assert in_pool.sum() == IN_POOL
    assert store.bring_up_keys(words).tolist() == in_pool.tolist()
    for key in np.flatnonzero(in_pool)[:3].tolist():
        assert store.remove(key)
    is_up = store.bring_up_keys(words[:-1][~in_pool[:-1]])
    assert is_up.sum() == 3 and store.pool.contains_each(words).sum() == IN_POOL
