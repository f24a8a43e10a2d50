"""Hosts with disks, with a quota and without a pool, and memory that goes bad.

No wrong bytes are read, and the directory reports what is there.
"""

import contextlib
import random

import numpy as np
import pytest

from mooncake_kernels.errors import ChecksumError, Unavailable
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import (
    HotKeys,
    Quota,
    Replicator,
    SsdTier,
    Store,
    TieredStore,
)

from ..support import eventually
from .support import value

NUM_KEYS = 100


def content(key: int) -> bytes:
    return value(key, 1000 + key * 37 % 60_000 + 100 * key)


class Actions:
    """One a name, on the store of a host; those that read check what they read."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)

    def keys(self, num: int = 10) -> list[int]:
        return [self.random.randrange(NUM_KEYS) for _ in range(num)]

    def put(self, cluster):
        keys = self.keys()
        cluster.put_each(keys, [content(key) for key in keys])

    def get(self, cluster):
        [key] = self.keys(1)
        assert cluster.get(key) in (None, content(key))

    def get_each(self, cluster):
        keys = self.keys()
        for key, got in zip(keys, cluster.get_each(keys), strict=True):
            assert got in (None, content(key))

    def get_into_each(self, cluster):
        keys = self.keys()
        buffers = [bytearray(80_000) for _ in keys]
        sizes = cluster.get_into_each(keys, buffers)
        for key, buffer, size in zip(keys, buffers, sizes.tolist(), strict=True):
            assert size < 0 or bytes(buffer[:size]) == content(key)

    def view(self, cluster):
        [key] = self.keys(1)
        pinned = cluster.view(key) if cluster.node.store else None
        if pinned is not None:
            with pinned:
                assert pinned.to_bytes() == content(key)

    def fetch(self, cluster):
        if cluster.node.store:
            cluster.fetch(self.keys())

    def replicate(self, cluster):
        Replicator(cluster).replicate(self.keys(3), 2)

    def remove(self, cluster):
        cluster.remove_each(self.keys(2))

    def damage(self, cluster):
        store = cluster.node.store
        if isinstance(store, TieredStore):  # the others do not verify what they have
            pinned = store.pool.pin(store.keyspace.key(self.keys(1)[0]))
            if pinned is not None:
                with pinned:
                    bits = pinned.tensor().numpy()
                    bits[len(bits) // 2] ^= 1


@pytest.mark.parametrize("seed", [0, 1])
def test_damaged_data_is_never_returned(hosts, tmp_path, seed, soak):
    stores: list[Store] = []
    for i in range(3):
        pool = ObjectPool.create(1 << 20)
        if i == 2:
            stores.append(Store(pool, quota=Quota(num_bytes=500_000)))
            break
        tier = SsdTier(tmp_path / f"tier-{i}", 8 << 20, bucket_bytes=1 << 20)
        stores.append(TieredStore(pool, tier, min_uses=1, verify=1.0, evict_ratio=0.1))
    transports = (("shm", "tcp"), ("tcp",), ("tcp",))
    made = [
        hosts.make(f"host-{i}", store=store, transports=transports[i])
        for i, store in enumerate(stores)
    ]
    made[0].cluster._hot = HotKeys(1)
    clusters = [host.cluster for host in made] + [hosts.make("none", 0).cluster]
    actions = Actions(seed)
    names = [name for name in vars(Actions) if name[0] != "_" and name != "keys"]
    for _ in range(20_000 if soak else 600):
        with contextlib.suppress(ChecksumError):  # where no copy was left that is whole
            getattr(actions, actions.random.choice(names))(actions.random.choice(clusters))
    for store, cluster in zip(stores, clusters, strict=False):
        if isinstance(store, TieredStore):
            assert store.flush()
        eventually(lambda c=cluster, s=store: (listed(hosts, c) == listable(s)).all())


def test_view_of_object_on_disk_fails_without_room_in_the_pool(hosts, tmp_path):
    tier = SsdTier(tmp_path / "tier", 4 << 20, bucket_bytes=1 << 20)
    store = TieredStore(ObjectPool.create(256 << 10), tier, min_uses=1)
    cluster = hosts.make("one", store=store, options={"claim_s": 10}).cluster
    tier.put_each(store.keyspace.keys([1]), [content(1)])
    for i in range(2, 6):
        store.put(i, bytes(64 << 10), retention="hard")
    assert cluster.get(1) == content(1)
    with pytest.raises(Unavailable, match="the own pool has no room"):
        cluster.view(1)
    store.remove(2)
    with cluster.view(1) as pinned:
        assert pinned.to_bytes() == content(1)


def listed(hosts, cluster) -> np.ndarray:
    """Of all keys whether the directory says that the pool has them."""
    pools = hosts.directory.holders(cluster.keyspace.keys(range(NUM_KEYS)))
    return np.array([cluster.node.pool_name in names for names in pools])


def listable(store: Store) -> np.ndarray:
    return store.has_keys(store.keyspace.keys(range(NUM_KEYS)))
