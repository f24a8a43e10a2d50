"""What a node publishes of its pool that other processes did, and of objects on a disk."""

import numpy as np

from mooncake_kernels.pool import ObjectPool, PutResult, object_keys
from mooncake_serving.store import SsdTier, Store, TieredStore
from mooncake_serving.store.cluster.directory_entries import Objects, PublishedSet
from mooncake_serving.store.cluster.membership import BEATS_A_COMPARISON

from ..support import eventually
from .support import SHORT_TTL_S, UNIT, value

MIB = 1 << 20


def test_changes_by_processes_without_a_node_are_published(hosts):
    one, two = hosts.several(2, ttl_s=SHORT_TTL_S)
    other = Store.open(one.store.pool.path)  # as in another process
    try:
        other.put("a", value(1))
        other.put("b", value(2))
        eventually(lambda: two.cluster.get("a") == value(1))
        eventually(lambda: two.cluster.exists("b"))
        other.remove("b")
        eventually(lambda: not two.cluster.exists("b"))
        assert two.cluster.get("a") == value(1)
    finally:
        other.close()


def test_changes_between_two_looks_are_published(hosts):
    one, two = hosts.several(2)
    entries, keys = one.node.entries, range(4)
    entries.publish_changes()
    other = Store.open(one.store.pool.path)
    try:
        one.cluster.put_each(keys, [value(i) for i in keys])
        for i in keys:
            other.remove(i)  # before the node has looked
        assert two.cluster.exists_each(keys).all()
        entries.publish_changes()
        assert not two.cluster.exists_each(keys).any()
        assert two.cluster.put(0, value(0)) is PutResult.STORED
        one.cluster.put_each([5, 6], [value(5), value(6)])
        entries.publish_changes()
        one.cluster.remove(5)
        other.put(5, value(5))
        entries.publish_changes()
        assert two.cluster.get_each([5, 6]) == [value(5), value(6)]
    finally:
        other.close()


def test_wrongly_withdrawn_objects_are_published_again(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    hosts.directory.withdraw(one.node.pool_name, one.cluster.keyspace.keys(["a"]))
    assert not two.cluster.exists("a")
    one.node.membership._look_once(BEATS_A_COMPARISON)
    assert two.cluster.get("a") == value(1)


def test_the_last_update_of_a_key_counts():
    keys = object_keys(np.arange(4), "")

    def objects(first, end, *ids):
        return Objects(keys[first:end], np.array(ids, np.uint64))

    published = PublishedSet(objects(0, 2, 1, 2))
    published.record(objects(0, 4, 1, 12, 13, 14))
    published.record(objects(1, 3, 0, 0))
    published.record(objects(2, 3, 23))
    found = published.all()
    by_key = dict(zip(map(tuple, found.keys.tolist()), found.ids.tolist(), strict=True))
    assert by_key == {tuple(keys[i].tolist()): id for i, id in ((0, 1), (2, 23), (3, 14))}
    published.record(objects(0, 0))
    assert len(published.all().ids) == 3


def test_objects_evicted_to_disk_are_read_by_other_hosts(hosts, tmp_path):
    tier = SsdTier(tmp_path / "tier", 64 * MIB, bucket_bytes=4 * MIB)
    pool = ObjectPool.create(16 * UNIT)
    store = TieredStore(pool, tier, min_uses=1, evict_ratio=0.25)
    hosts.make("one", store=store)
    two = hosts.make("two", 256 * UNIT)
    keys = np.arange(1, 49, dtype=np.uint64)
    for key in keys.tolist():
        store.put(key, value(key))
    hosts.all[0].node.entries.publish_all()
    assert store.flush(60)
    assert store.tier.stats().num_objects > 0
    assert two.cluster.match_prefix(keys) == len(keys)
    assert two.cluster.get_each(keys) == [value(key) for key in keys.tolist()]
    two.cluster.remove(1)
    assert not store.exists(1)
