"""The example of docs/store/admin.md: a router's index that follows what stores publish."""

import numpy as np

import mooncake_kernels as mk
from mooncake_serving.conductor import KVEvent, PrefixIndex
from mooncake_serving.store import Store
from mooncake_serving.store.events import (
    AllBlocksCleared,
    BlockStored,
    EventPublisher,
    StoreEvents,
    subscribe,
)

from ..support import eventually


class Follower:
    """Applies the events of one publisher to an instance of an index."""

    def __init__(self, index: PrefixIndex, instance: int):
        self._index = index
        self._instance = instance
        self._sequence = 0

    def apply(self, batch, known_keys) -> None:
        """``known_keys()`` lists what is there, as GET /objects does; asked for after a gap."""
        if batch.is_after_gap:
            self._tell(stored=(tuple(known_keys()),), snapshot=True)
        for event in batch.events:
            if isinstance(event, AllBlocksCleared):
                self._tell(snapshot=True)
            elif isinstance(event, BlockStored):
                self._tell(stored=(tuple(event.block_hashes),))
            else:
                self._tell(removed=tuple(event.block_hashes))

    def _tell(self, **what) -> None:
        self._index.apply(KVEvent(self._instance, self._sequence, **what))
        self._sequence += 1


def test_an_index_follows_a_store(pool):
    keys = mk.block_hashes(np.arange(40, dtype=np.uint32), 4)
    index = PrefixIndex(2)
    store = Store(pool, namespace="a", evict_ratio=0)
    store.put_each(keys[:3], [b"x"] * 3)
    with (
        EventPublisher("tcp://127.0.0.1:0", namespace="a") as publisher,
        StoreEvents(store, publisher, interval_s=0.01),
        subscribe(publisher.endpoint) as heard,
    ):
        follower = Follower(index, 1)

        def there():
            return [int(key) for key in keys if store.exists(key)]

        def follow(num_blocks):
            def follows():
                publisher.publish_snapshot(pool.objects().keys)
                if (batch := heard.receive(0.05)) is not None:
                    follower.apply(batch, there)
                return index.match([int(key) for key in keys]).tolist() == [0, num_blocks]

            return eventually(follows)

        assert follow(3)  # what was there before anybody listened
        store.put_each(keys[3:8], [b"x"] * 5)
        assert follow(8)
        store.remove(keys[5])
        assert follow(5)
        store.put(keys[5], b"x")
        store.put("large", bytes(60 * 4096))
        assert not any(store.exists_each(keys[:4])) and follow(0)


def test_index_is_rebuilt_from_the_store_after_a_gap():
    from mooncake_serving.store.events import EventBatch

    index = PrefixIndex(1)
    follower = Follower(index, 0)
    follower.apply(EventBatch(1, 0.0, [BlockStored([1, 2], None, [], 0, None)], None, False), list)
    follower.apply(
        EventBatch(9, 0.0, [BlockStored([4], None, [], 0, None)], None, True), lambda: [2, 3]
    )
    assert [index.num_holders(key) for key in (1, 2, 3, 4)] == [0, 1, 1, 1]
