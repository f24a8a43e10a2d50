"""What a node tells of its pool that it did not do itself, and of what lies on a disk."""

import numpy as np

from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import SsdTier, Store, TieredStore

from ..support import eventually
from .support import SHORT_TTL_S, UNIT, value

MIB = 1 << 20


def test_what_processes_without_a_node_put_and_evict_is_told(hosts):
    one, two = hosts.several(2, ttl_s=SHORT_TTL_S)
    other = Store.open(one.store.pool.path)  # as in another process
    try:
        other.put("a", value(1))
        other.put("b", value(2))
        assert eventually(lambda: two.cluster.get("a") == value(1))
        assert eventually(lambda: two.cluster.exists("b"))
        other.remove("b")
        assert eventually(lambda: not two.cluster.exists("b"))
        assert two.cluster.get("a") == value(1)
    finally:
        other.close()


def test_what_was_evicted_to_a_disk_is_read_by_others(hosts, tmp_path):
    tier = SsdTier(tmp_path / "tier", 64 * MIB, bucket_bytes=4 * MIB)
    pool = ObjectPool.create(16 * UNIT)
    store = TieredStore(pool, tier, min_uses=1, evict_ratio=0.25)
    hosts.make("one", store=store)
    two = hosts.make("two", 256 * UNIT)
    keys = np.arange(1, 49, dtype=np.uint64)
    for key in keys.tolist():
        store.put(key, value(key))
    hosts.all[0].node.listing.publish_all()
    assert store.flush(60)
    assert store.tier.stats().num_objects > 0
    assert two.cluster.match_prefix(keys) == len(keys)
    assert two.cluster.get_each(keys) == [value(key) for key in keys.tolist()]
    two.cluster.remove(1)
    assert not store.exists(1)
