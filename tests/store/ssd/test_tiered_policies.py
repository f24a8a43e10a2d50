"""Every policy chooses what leaves a pool that has a disk behind it."""

import threading

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import (
    LengthAware,
    Quota,
    SsdTier,
    Store,
    TieredStore,
    largest_first,
    lru,
)

from ..support import EXISTS, STORED, eventually
from .support import PAGE
from .tiered import BUCKET, IN_POOL, KEYS, OBJECT, POLICIES, put, read, value

policies = pytest.mark.parametrize("policy", POLICIES)


@policies
@pytest.mark.parametrize("min_uses", [1, 2])
@pytest.mark.usefixtures("full_disk")
def test_eviction_order_matches_a_pool_without_a_disk(tmp_path, policy, min_uses):
    """Whether objects are written first or not: those in the pool are the same."""
    rng = np.random.default_rng(4)
    pools = [ObjectPool.create(40 * PAGE, num_objects=40) for _ in range(2)]
    tier = SsdTier(tmp_path / "tier", 16 * BUCKET, bucket_bytes=BUCKET, slot_bytes=4 * PAGE)
    options = {"eviction": policy, "evict_ratio": 0, "namespace": "model"}
    with (
        TieredStore(pools[0], tier, min_uses=min_uses, **options) as store,
        Store(pools[1], **options) as other,
    ):
        for key in range(80):
            in_pool = np.sort(other.pool.objects().keys[:, 0])
            for used in rng.permutation(in_pool)[:3].tolist():
                for pool in pools:
                    pool.pin(store.keyspace.key(used)).close()
            num_bytes, position = int(rng.integers(1, 4 * PAGE)), int(rng.integers(100))
            retention = "soft" if key % 10 == 0 else "normal"
            while other.stats().largest_free_bytes < 4 * PAGE:
                assert len(other.evict(1).keys) == 1
                store.evict(1)
                assert store.flush()
                [left, expected] = (set(pool.objects().keys[:, 0].tolist()) for pool in pools)
                assert left == expected
            for each in (store, other):
                result = each.put(key, bytes(num_bytes), position=position, retention=retention)
                assert result is STORED
        stats = store.demotion_stats()
        written = stats.num_written
        assert written == 80 - store.stats().num_ready if min_uses == 1 else 5 < written < 70
        assert stats.num_dropped == stats.num_unadmitted
        assert written + stats.num_unadmitted == 80 - store.stats().num_ready


@policies
def test_evicted_objects_are_not_lost(opened, policy):
    store = opened(eviction=policy)
    assert put(store, *KEYS) == [STORED] * len(KEYS)
    assert store.exists_each(KEYS).all() and store.match_prefix([*KEYS, 99, 0]) == len(KEYS)
    assert store.flush() and store.exists_each(KEYS).all()
    assert store.demotion_stats().num_written >= len(KEYS) - IN_POOL
    assert read(store, *KEYS) == [OBJECT] * len(KEYS)
    assert store.match_prefix(KEYS) == len(KEYS) and store.demotion_stats().num_dropped == 0


@policies
def test_full_disk_admits_only_reused_objects(opened, full_disk, policy):
    store = opened(eviction=policy, min_uses=2)
    put(store, 0, 1, 2, 3)
    others = Store(store.pool, namespace="model")  # as of a process that has not the tier
    assert others.get(1) == value(1).tobytes() and read(store, 2) == [OBJECT]
    assert put(store, 3) == [EXISTS]  # a use as well
    store.evict(IN_POOL * OBJECT)
    assert store.flush() and store.exists_each(range(4)).tolist() == [False, True, True, True]
    put(store, *range(10, 30))
    assert store.flush()
    stats = store.demotion_stats()
    assert stats.num_dropped == stats.num_unadmitted == 1 + 20 - store.stats().num_ready


@policies
def test_queued_objects_count_as_evicted_and_not_as_used(opened, monkeypatch, policy):
    """The next look queues nothing else, unless a put finds no room."""
    store, goes_on = opened(eviction=policy), threading.Event()
    real = store.tier.put_each
    monkeypatch.setattr(store.tier, "put_each", lambda *values: goes_on.wait(60) and real(*values))
    put(store, *range(IN_POOL))
    before = store.pool.objects().recency.tolist()
    for _ in range(3):
        assert len(store.evict(2 * OBJECT).keys) == len(store.evict_objects(2).keys) == 0
        assert store.demotion_stats().num_queued == 2
    assert store.pool.objects().recency.tolist() == before
    writer = threading.Thread(target=put, args=(store, 10))
    writer.start()
    eventually(lambda: store.demotion_stats().num_queued == 3)
    goes_on.set()
    writer.join()
    assert store.flush() and store.demotion_stats().num_dropped == 0
    in_pool = store.pool.contains_each(store.keyspace.keys([*range(IN_POOL), 10]))
    assert in_pool.tolist() == [*[True] * 5, *[False] * 3, True]  # the tail goes first


@policies
def test_pinned_and_hard_stay_and_soft_goes_last(opened, policy):
    store = opened(eviction=policy)
    for key in range(IN_POOL):
        store.put(key, value(key), retention=["soft", "hard", "normal"][min(key, 2)])
    with store.view(2), store.view(3):
        store.evict(4 * OBJECT)
        assert store.flush()
        in_pool = store.pool.contains_each(store.keyspace.keys(range(IN_POOL)))
        assert in_pool.tolist() == [True] * 4 + [False] * 4
        store.evict(IN_POOL * OBJECT)
        assert store.flush()
        in_pool = store.pool.contains_each(store.keyspace.keys(range(IN_POOL)))
        assert in_pool.tolist() == [False] + [True] * 3 + [False] * 4
    assert read(store, *range(IN_POOL)) == [OBJECT] * IN_POOL


@policies
def test_a_full_queue_drops_and_counts(opened, monkeypatch, policy):
    store, goes_on = opened(eviction=policy, queue_bytes=2 * OBJECT), threading.Event()
    real = store.tier.put_each
    monkeypatch.setattr(store.tier, "put_each", lambda *values: goes_on.wait(60) and real(*values))
    put(store, *range(IN_POOL))
    assert len(store.evict(5 * OBJECT).keys) == 3
    stats = store.demotion_stats()
    assert (stats.num_queued, stats.queued_bytes, stats.num_queue_full) == (2, 2 * OBJECT, 3)
    assert stats.num_dropped == 3
    assert put(store, *range(10, 14)) == [STORED] * 4  # without waiting for the disk
    stats = store.demotion_stats()
    assert (stats.num_queued, stats.queued_bytes, stats.num_written) == (2, 2 * OBJECT, 0)
    assert stats.num_dropped == stats.num_queue_full >= 4
    goes_on.set()
    assert store.flush()
    gone = store.demotion_stats().num_dropped
    assert (~store.exists_each([*range(IN_POOL), *range(10, 14)])).sum() == gone


@policies
def test_quota_with_a_full_index(tmp_path, policy):
    tier = SsdTier(tmp_path / "tier", 8 * BUCKET, bucket_bytes=BUCKET)
    pool = ObjectPool.create(1 << 20, num_objects=20)
    options = {"eviction": policy, "quota": Quota(num_objects=15), "namespace": "model"}
    with (
        TieredStore(pool, tier, min_uses=1, evict_ratio=0.1, **options) as store,
        Store(ObjectPool.open(pool.path), namespace="other") as other,
    ):
        for key in range(60):
            assert store.put(key, bytes(100)) is STORED
            assert store.usage().num_objects <= 15
        for key in range(10):
            other.put(key, bytes(100))
        for key in range(60, 120):
            assert store.put(key, bytes(100)) is STORED
            assert store.flush() and store.stats().num_ready <= 20
        assert store.exists_each(range(120)).sum() >= 115  # the other process evicts without a disk


@pytest.mark.parametrize("is_quota", [False, True])
def test_objects_demoted_after_the_policy_looked_are_kept(opened, is_quota):
    store = opened()

    def late(pool, num_bytes):
        keys = pool.objects().keys
        assert all(store._demoter.offer(tuple(key)) for key in keys.tolist()) and store.flush()
        return pool.evict_keys(keys)

    put(store, *range(IN_POOL))
    store.eviction = late
    store._room.evict_by(late, 1) if is_quota else store.evict(1)
    assert store.stats().num_ready == 0 and store.exists_each(range(IN_POOL)).all()
    assert read(store, *range(IN_POOL)) == [OBJECT] * IN_POOL


def test_promoted_object_keeps_its_position(opened):
    """So `length_aware` takes the tail of a prompt first also then."""
    store = opened()
    put(store, *range(IN_POOL))
    store.evict(IN_POOL * OBJECT)
    store.close()
    store = opened()
    assert store.stats().num_ready == 0
    assert store.get(0) is not None and read(store, 1, 2) == [OBJECT] * 2
    assert store.bring_up_keys(store.keyspace.keys([3, 4])).all()
    for key in (7, 6, 5):
        store.view(key).close()
    objects = store.pool.objects()
    assert objects.position.tolist() == objects.keys[:, 0].tolist()
    for key in [3, 4, *range(IN_POOL)]:  # each was used as often as the others, the tail last
        store.pool.pin(store.keyspace.key(key)).close()
    store.eviction = LengthAware(half_life=100, depth=4)
    store.evict(3 * OBJECT)
    assert store.pool.contains_each(store.keyspace.keys(range(IN_POOL))).tolist() == [
        *[True] * 5,
        *[False] * 3,
    ]


def test_policy_can_be_replaced(opened):
    store = opened()
    assert store.eviction is lru
    store.eviction = largest_first
    store.put(0, bytes(2 * OBJECT))
    put(store, 1, 2, 3)
    store.evict(1)
    assert store.flush() and store.exists(0) and not store.pool.contains(store.keyspace.key(0))


def test_failing_custom_policy_raises_and_reports_evictions(opened, full_disk):
    """It raises, and what it evicted before that is reported."""
    store, gone = opened(min_uses=2), []
    store.on_evicted.append(lambda keys: gone.extend(keys[:, 0].tolist()))

    def failing(pool, num_bytes):
        pool.evict_keys(pool.objects().keys[:1])
        raise InvalidArgument("it fails")

    put(store, 1)
    store.eviction = failing
    with pytest.raises(InvalidArgument, match="it fails"):
        store.evict(1)
    assert gone == [1]


def oldest_in_a_list(pool, num_bytes):
    objects = pool.objects()
    order = np.argsort(objects.recency)[: max(1, num_bytes // PAGE)]
    return pool.evict_keys([tuple(key) for key in objects.keys[order].tolist()])


def oldest_by_id(pool, num_bytes):
    objects = pool.objects()
    order = np.argsort(objects.recency)[: max(1, num_bytes // PAGE)]
    return pool.evict_keys(objects.keys[order], objects.ids[order])


@pytest.mark.parametrize("policy", [oldest_in_a_list, oldest_by_id])
@pytest.mark.parametrize("num_objects", [40, 64])
@pytest.mark.parametrize("tiered", [False, True])
def test_custom_policies_with_tiered_and_plain_stores(tmp_path, policy, num_objects, tiered):
    """Also where entries of the index are missing: there are 40 of 64 units."""
    pool = ObjectPool.create(64 * PAGE, num_objects=num_objects)
    tier = SsdTier(tmp_path / "tier", 16 * BUCKET, bucket_bytes=BUCKET)
    store = TieredStore(pool, tier, eviction=policy) if tiered else Store(pool, eviction=policy)
    with tier, store:
        for key in range(200):
            assert store.put(key, bytes(PAGE)) is STORED
