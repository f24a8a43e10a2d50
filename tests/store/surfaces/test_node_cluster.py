"""A node of this process, seen through the admin routes."""

import threading

import numpy as np
import pytest

from mooncake_kernels.pool import ObjectPool, PutResult
from mooncake_serving.store import SsdTier, TieredStore
from mooncake_serving.store.admin import NodeCluster
from mooncake_serving.store.directory import EmbeddedDirectory

from ..cluster.support import SHORT_TTL_S, UNIT, Hosts, SomeDirectory, replaced, value
from ..support import eventually


@pytest.mark.parametrize(
    "error, told",
    [(OSError(5, "disk"), "disk"), (TimeoutError(), "TimeoutError"), (KeyError("x"), "x")],
)
def test_a_failed_drain_is_reported_and_can_be_repeated(error, told):
    hosts = Hosts(EmbeddedDirectory())
    try:
        one, two = hosts.several(2)
        one.cluster.put("a", value(1))

        def fails(original, keys):
            raise error

        with NodeCluster(one.node) as cluster:
            with replaced(one.store, "hide_keys", fails):
                cluster.drain(one.node.name)
                eventually(lambda: cluster.draining().state == "failed")
            assert told in cluster.draining().error
            words = one.cluster.keyspace.keys(["a"])
            assert one.node.pool_name in hosts.directory.holders(words)[0]
            assert np.array_equal(one.store.list_objects()[0], words)
            cluster.drain(one.node.name)
            eventually(lambda: cluster.draining().state == "left")
        assert two.store.get("a") == value(1)
    finally:
        hosts.close()


@pytest.fixture
def held(hosts):
    """A node with 300 objects, another, its cluster, and what lets its drain go on: it has begun to
    move the first batch.
    """
    one, two = hosts.several(2, 1024 * UNIT)
    for i in range(300):
        one.cluster.put(i, value(i, 64))
    is_moving, goes_on = threading.Event(), threading.Event()

    def pull(original, *args, **options):
        is_moving.set()
        eventually(goes_on.is_set)
        return original(*args, **options)

    with NodeCluster(one.node) as cluster, replaced(one.node.client, "pull", pull):
        cluster.drain(one.node.name)
        eventually(is_moving.is_set)
        yield one, two, cluster, goes_on


def test_drain_cancelled_in_progress(held):
    one, two, cluster, goes_on = held
    cluster.cancel_drain(one.node.name)
    progress = cluster.draining()
    assert progress.state == "draining" and not progress.is_accepting
    goes_on.set()
    eventually(lambda: cluster.draining().is_accepting)
    progress = cluster.draining()
    assert (progress.state, progress.num_moved, progress.num_left) == ("idle", 128, 172)
    assert one.cluster.put("new", value(1)) is PutResult.STORED and one.store.exists("new")
    assert two.cluster.get_each(range(300)) == [value(i, 64) for i in range(300)]
    cluster.drain(one.node.name)
    eventually(lambda: cluster.draining().state == "left")
    assert two.store.get("new") == value(1)
    assert not cluster.draining().is_accepting
    with pytest.raises(NotImplementedError, match="has left"):
        cluster.cancel_drain(one.node.name)


def test_drain_requested_again_during_cancellation(held):
    one, two, cluster, goes_on = held
    for _ in range(2):
        cluster.cancel_drain(one.node.name)
        cluster.drain(one.node.name)
    goes_on.set()
    eventually(lambda: cluster.draining().state == "left")
    assert two.store.get_each(range(300)) == [value(i, 64) for i in range(300)]


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_running_drain_is_switched_to_leave_the_disk(hosts, tmp_path, is_cancelled):
    """The one that runs ends after its current batch, and another one follows."""
    tier = SsdTier(tmp_path / "tier", 64 << 20, bucket_bytes=4 << 20)
    store = TieredStore(ObjectPool.create(16 * UNIT), tier, min_uses=1)
    one, two = hosts.make("one", store=store), hosts.make("two", 256 * UNIT)
    for i in range(64):
        one.cluster.put(i, value(i))
    assert store.flush(60)
    is_up, goes_on = threading.Event(), threading.Event()

    def bring_up_keys(original, keys):
        is_up.set()
        eventually(goes_on.is_set)
        return original(keys)

    with NodeCluster(one.node) as cluster, replaced(store, "bring_up_keys", bring_up_keys):
        cluster.drain(one.node.name)
        eventually(is_up.is_set)
        cluster.drain(one.node.name)  # is the same
        assert not cluster._stop.is_set()
        cluster.drain(one.node.name, leave_disk=True)
        if is_cancelled:
            cluster.cancel_drain(one.node.name)
        goes_on.set()
        eventually(lambda: cluster.draining().state == ("idle" if is_cancelled else "left"))
        progress = cluster.draining()
    assert 0 < progress.num_on_disk == len(store.on_disk()[0]) and progress.num_left == 0
    assert sum(map(two.store.exists, range(64))) == 64 - progress.num_on_disk


def test_drain_is_cancelled_without_the_directory(hosts):
    directory = SomeDirectory(hosts.directory)
    one = hosts.make("one", directory=directory, ttl_s=SHORT_TTL_S)
    one.cluster.put("a", value(1))
    with NodeCluster(one.node) as cluster:
        cluster.cancel_drain(one.node.name)  # there is none
        assert cluster.draining().state == "idle"
        directory.is_away = True
        cluster.drain(one.node.name)
        eventually(lambda: cluster.draining().state == "failed")
        assert not cluster.draining().is_accepting
        cluster.cancel_drain(one.node.name)
        progress = cluster.draining()
        assert (progress.state, progress.error, progress.is_accepting) == ("idle", None, True)
        with pytest.raises(NotImplementedError, match="only another"):
            cluster.cancel_drain("another")
        directory.is_away = False
        eventually(lambda: [m.is_draining for m in hosts.directory.members()] == [False])
        assert one.cluster.put("b", value(2)) is PutResult.STORED
