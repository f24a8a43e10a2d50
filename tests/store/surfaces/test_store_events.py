"""What a subscriber learns of a pool to which other processes do things, and of the disk behind."""

import logging
import os
import random
import signal
import threading
import time

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool, PoolChanges, PutResult
from mooncake_serving.compat.mooncake import MooncakeDistributedStore
from mooncake_serving.store import SsdTier, Store, TieredStore
from mooncake_serving.store.events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisher,
    StoreEvents,
    Subscription,
    subscribe,
)

from ..support import child, ended_well, eventually, kill
from .support import serving

TCP = "tcp://127.0.0.1:0"
SIZE = 4096
BUCKET = 64 << 10
EVENTS = ["--events", TCP, "--replay", TCP, "--events-interval", "0.01"]


class Router:
    """What is where, by the events. They leave nothing out, and say nothing twice."""

    def __init__(self, subscription: Subscription):
        self._subscription = subscription
        self.blocks: dict[str, set[bytes]] = {"CPU": set(), "STORAGE": set()}
        self.told: list[tuple[type, str, bytes]] = []

    def hear(self, timeout_s: float = 0.01) -> None:
        batch = self._subscription.receive(timeout_s)
        for event in () if batch is None else batch.events:
            assert not batch.is_after_gap
            if isinstance(event, AllBlocksCleared):
                assert not any(self.blocks.values())
                continue
            hashes, there = set(event.block_hashes), self.blocks[event.medium]
            assert len(hashes) == len(event.block_hashes)
            if isinstance(event, BlockStored):
                assert not hashes & there
                there |= hashes
            else:
                assert hashes <= there
                there -= hashes
            self.told += [(type(event), event.medium, one) for one in event.block_hashes]

    def hears(self, in_memory: np.ndarray, on_disk: np.ndarray | None = None) -> bool:
        """Whether it learns that exactly these keys are there."""
        wanted = {"CPU": words_of(in_memory), "STORAGE": words_of(on_disk)}

        def is_told() -> bool:
            self.hear()
            return self.blocks == wanted

        return eventually(is_told)

    def take(self) -> list[tuple[type, str, bytes]]:
        taken, self.told = self.told, []
        return taken


def words_of(keys: np.ndarray | None) -> set[bytes]:
    return set() if keys is None else {key.astype(">u8").tobytes() for key in keys}


def live(path) -> None:
    """Puts, removes and evicts until it is killed."""
    chance = random.Random()
    with Store.open(path, namespace="a", evict_ratio=0) as store:
        while True:
            key = chance.randrange(60)
            if chance.random() < 0.6:
                store.put(key, bytes(chance.randrange(1, 4 * SIZE)))
            elif chance.random() < 0.8:
                store.remove(key)
            else:
                store.evict(SIZE)


def test_changes_by_other_processes_are_published(path):
    """They are killed again and again. Whoever subscribes late, or missed much, gets it all."""
    with ObjectPool.create(64 * SIZE, path, num_objects=64) as pool:
        pool.put_from((1, 1), b"before")
        with serving(path, "--port", 0, *EVENTS) as (_, lines):
            events, replay = lines[0].split()[2:]
            with subscribe(events, replay_endpoint=replay) as heard:
                router = Router(heard)
                for _ in range(5):
                    with child(lambda: live(path)) as first, child(lambda: live(path)) as second:
                        until = time.monotonic() + random.uniform(0.05, 0.2)
                        while time.monotonic() < until:
                            router.hear()
                        kill(first)
                        kill(second)
                    assert router.hears(pool.objects().keys)
                assert len(router.told) > 60
                with subscribe(events, replay_endpoint=replay) as late:
                    assert Router(late).hears(pool.objects().keys)


def test_changes_through_the_mooncake_api_are_published(path):
    """And whoever removes it: another process, or the server."""

    def use() -> None:
        store = MooncakeDistributedStore()
        assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 24, "tcp", "", str(path)) == 0
        assert [store.put(f"k{i}", b"x" * 1000) for i in range(5)] == [0] * 5
        assert store.remove("k0") == 0
        store.close()

    with ObjectPool.create(1 << 20, path) as pool:
        with serving(path, "--port", 0, *EVENTS) as (pid, lines):
            events, replay = lines[0].split()[2:]
            with subscribe(events, replay_endpoint=replay) as heard:
                router = Router(heard)
                with child(use) as user:
                    assert ended_well(user)
                keys = pool.objects().keys
                assert len(keys) == 4 and router.hears(keys)
                pool.remove_each(keys[:2])
                os.kill(pid, signal.SIGTERM)  # what it has not told by then, it tells at its end
                assert router.hears(keys[2:])


@pytest.fixture
def tiered(path, tmp_path):
    """Opens a store of 16 objects in memory and 10 on the disk, which may be there already."""

    def open_store() -> TieredStore:
        pool = ObjectPool.open(path) if path.exists() else ObjectPool.create(16 * SIZE, path)
        return TieredStore(
            pool,
            SsdTier(tmp_path / "tier", 2 * BUCKET, bucket_bytes=BUCKET, retry_s=0),
            namespace="a",
            min_uses=1,
            evict_ratio=0,
        )

    return open_store


@pytest.fixture
def publisher():
    with EventPublisher(TCP, replay_endpoint=TCP) as made:
        yield made


def hearing(publisher: EventPublisher) -> Subscription:
    return subscribe(publisher.endpoint, replay_endpoint=publisher.replay_endpoint)


def to_disk(store: TieredStore, *keys: int) -> None:
    for key in keys:
        assert store._demoter.offer(store.keyspace.key(key))
    assert store.flush()


def test_moves_to_the_disk_and_back_are_published(tiered, publisher):
    with (
        tiered() as store,
        StoreEvents(store, publisher, interval_s=0.01) as events,
        hearing(publisher) as heard,
    ):
        router, [key] = Router(heard), store.keyspace.keys([7])
        word = key.astype(">u8").tobytes()
        store.put(7, bytes(SIZE))
        assert router.hears([key]) and router.take() == [(BlockStored, "CPU", word)]
        to_disk(store, 7)
        assert router.hears([], [key])
        demoted = [(BlockStored, "STORAGE", word), (BlockRemoved, "CPU", word)]
        assert router.take() == demoted  # at no moment nowhere
        assert store.get(7) == bytes(SIZE)
        assert router.hears([key], [key]) and router.take() == [(BlockStored, "CPU", word)]
        to_disk(store, 7)  # where it is already
        assert router.hears([], [key]) and router.take() == [(BlockRemoved, "CPU", word)]
        with Store.open(store.pool.path, namespace="a") as other:  # without the disk
            other.remove(7)
        assert router.hears([], []) and router.take() == [(BlockRemoved, "STORAGE", word)]
        store.put(7, bytes(SIZE))
        to_disk(store, 7)
        assert router.hears([], [key])
        events.close()
        events.close()
        store.remove(7)
        assert router.blocks["STORAGE"] == {word} and not store.tier._index._watches


def test_objects_dropped_from_a_full_disk_are_published(tiered):
    """Whatever moves, and is dropped with its bucket, it is told so in the end, also to a router
    that begins with what was on the disk before.
    """
    chance = random.Random()
    for _ in range(2):
        with (
            tiered() as store,
            EventPublisher(TCP, replay_endpoint=TCP) as publisher,
            StoreEvents(store, publisher, interval_s=0.001),
            hearing(publisher) as heard,
        ):
            router = Router(heard)
            assert router.hears(store.pool.objects().keys, store.tier.keys())
            for _ in range(200):
                key = chance.randrange(40)
                if chance.random() < 0.6:
                    store.put(key, bytes(chance.randrange(1, SIZE)))
                elif chance.random() < 0.8:
                    store.get(key)
                else:
                    store.remove(key)
                router.hear(0)
            assert store.flush() and store.tier.stats().num_dropped > 0
            assert router.hears(store.pool.objects().keys, store.tier.keys())


def test_puts_and_removals_by_another_node_are_published(hosts, publisher):
    """Of which this process's Python learns nothing."""
    one, two = hosts.several(2)
    two.node.set_draining(True)  # it puts into the other pool
    with StoreEvents(one.store, publisher, interval_s=0.01), hearing(publisher) as heard:
        router = Router(heard)
        for i in range(5):
            assert two.cluster.put(i, bytes(SIZE)) is PutResult.STORED
        assert router.hears(one.cluster.keyspace.keys(range(5)))
        two.cluster.remove(3)
        assert router.hears(one.cluster.keyspace.keys([0, 1, 2, 4]))


def test_events_are_delayed_while_a_stopped_process_holds_the_pool(pool, publisher, caplog):
    """It holds the pool: they come once it goes on, and are late until then."""
    with Store(pool) as store, hearing(publisher) as heard:
        with StoreEvents(store, publisher, interval_s=0.001) as events:
            router, look = Router(heard), events._pool.look
            num_looks = 0
            is_free = threading.Event()

            def fails() -> PoolChanges:
                nonlocal num_looks
                num_looks += 1
                if not is_free.is_set():
                    raise TimeoutError("a stopped process holds the pool")
                return look()

            events._pool.look = fails
            store.put(1, b"x")
            with caplog.at_level(logging.WARNING):
                eventually(lambda: num_looks > 3)
            assert caplog.text.count("events of a store are late") == 1
            is_free.set()
            assert router.hears(pool.objects().keys)


def test_closing_the_pool_ends_its_events(pool, publisher, caplog):
    with StoreEvents(Store(pool), publisher, interval_s=0.001) as events:
        pool.close()
        eventually(lambda: not events._thread.is_alive())
    assert "events of a store end: look: pool must be open" in caplog.text


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"store": 5}, "store must be a Store, got 5"),
        ({"publisher": None}, "publisher must be an EventPublisher, got None"),
        ({"interval_s": 0}, "interval_s must be above 0 and at most 3600, got 0"),
        ({"interval_s": float("nan")}, "interval_s must be above 0 and at most 3600, got nan"),
        ({"interval_s": "1"}, "interval_s must be above 0 and at most 3600, got '1'"),
    ],
)
def test_wrong_arguments(pool, publisher, arguments, words):
    arguments = {"store": Store(pool), "publisher": publisher, **arguments}
    with pytest.raises(InvalidArgument, match=f"^StoreEvents: {words}"):
        StoreEvents(**arguments)
