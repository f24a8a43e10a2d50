"""TieredStore: objects that a process without the tier evicts from the pool, and puts anew."""

import pytest

from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import SsdTier, Store, TieredStore

from ..support import STORED
from .support import PAGE
from .tiered import BUCKET, IN_POOL, OBJECT, is_on_disk, put, read, to_disk, value

NEW = b"new" * 1000


@pytest.fixture(params=[1, 2])
def promoted(opened, request):
    """A store whose object 0 is in both tiers, and another process's store on its pool."""
    store = opened(min_uses=request.param)
    put(store, 0)
    to_disk(store, 0)
    assert read(store, 0) == [OBJECT]
    return store, Store(store.pool, namespace="model")


def replace(others: Store, new: bytes = NEW) -> None:
    others.evict(IN_POOL * OBJECT)
    assert others.put(0, new) is STORED


def evict(store: TieredStore) -> None:
    store.evict(IN_POOL * OBJECT)
    assert store._demoter.flush() and not store.pool.contains(store.keyspace.key(0))


@pytest.mark.parametrize("new", [NEW, value(1).tobytes(), b""], ids=["size", "bytes", "empty"])
def test_old_bytes_do_not_replace_new_ones(promoted, new):
    store, others = promoted
    replace(others, new)
    assert store.get(0) == new
    evict(store)
    assert store.get(0) == new  # by now used twice


def test_eviction_by_a_process_without_the_tier_keeps_disk_copy(promoted):
    store, others = promoted
    others.evict(IN_POOL * OBJECT)
    assert read(store, 0) == [OBJECT]
    assert store.remove(0) and not store.exists(0)


def test_promoted_object_is_evicted_without_reading_the_disk(promoted):
    store, _ = promoted
    hits = store.tier.stats().num_hits
    evict(store)
    assert store.tier.stats().num_hits == hits and store.demotion_stats().num_written == 1


@pytest.mark.parametrize("why", ["too_large", "queue_full", "unwritten"])
def test_object_that_cannot_replace_its_disk_copy_is_dropped(promoted, monkeypatch, why):
    store, others = promoted

    def fail(key):
        raise Unavailable("the disk could not be written")

    replace(others)
    assert store.get(0) == NEW
    with monkeypatch.context() as patch:
        if why == "too_large":
            patch.setattr(store.tier, "max_object_bytes", 100)
        elif why == "queue_full":
            patch.setattr(store._demoter, "_queue_bytes", 100)
        else:
            patch.setattr(store.tier, "remove", fail)
        evict(store)
        stats = store.demotion_stats()
        assert store.get(0) is None and stats.num_dropped == getattr(stats, f"num_{why}") == 1
    assert store.flush() and not is_on_disk(store, 0)


def test_disk_copy_that_cannot_be_compared_is_replaced(promoted, monkeypatch):
    store, others = promoted

    def fail(*arguments):
        raise TransferError("the deadline passed", "timed_out")

    replace(others, value(1).tobytes())
    assert store.get(0) == value(1).tobytes()
    with monkeypatch.context() as patch:
        patch.setattr(store.tier, "get_into_each", fail)
        evict(store)
    assert store.get(0) == value(1).tobytes()


@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("checksum", [False, True])
def test_restart_with_the_same_pool_compares_both_tiers(opened, tmp_path, is_replaced, checksum):
    store = opened(checksum=checksum)
    put(store, 0)
    to_disk(store, 0)
    assert read(store, 0) == [OBJECT]
    pool = ObjectPool.open(store.pool.path)
    if is_replaced:
        replace(Store(pool, namespace="model", checksum=checksum))
    store.close()
    tier = SsdTier(tmp_path / "tier", 8 * BUCKET, bucket_bytes=BUCKET, slot_bytes=4 * PAGE)
    with TieredStore(pool, tier, namespace="model", checksum=checksum) as store:
        before = tier.stats().user_bytes
        evict(store)
        assert is_on_disk(store, 0) and (tier.stats().user_bytes > before) == is_replaced
        assert store.get(0) == (NEW if is_replaced else value(0).tobytes())
