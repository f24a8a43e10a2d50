"""Removed objects stay removed where the only copy left is on a disk."""

import pytest

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import SsdTier, Store, TieredStore

from ..replication.support import hosts_with
from ..support import STORED
from .support import UNIT, replaced, value
from .test_removal import look_at_everything


def with_disk(tmp_path) -> TieredStore:
    tier = SsdTier(tmp_path / "tier", 4 << 20, bucket_bytes=1 << 20)
    return TieredStore(ObjectPool.create(64 * UNIT), tier, min_uses=1)


def to_disk(store: TieredStore, key: str) -> None:
    words = store.keyspace.keys([key])
    store.evict(store.pool.capacity_bytes)
    assert store.flush() and store.tier.contains_each(words).all()
    assert not store.pool.contains_each(words).any()


@pytest.fixture(params=["no disk", "disk", "pool", "both"])
def holding(hosts, tmp_path, request):
    """A host that has object "a" on its disk, in its pool, or both; and another host."""
    store = None if request.param == "no disk" else with_disk(tmp_path)
    one, two = hosts.make("one", store=store), hosts.make("two")
    assert one.cluster.put("a", value(1)) is STORED
    if request.param in ("disk", "both"):
        to_disk(store, "a")
    if request.param == "both":
        assert store.get("a") == value(1)
    look_at_everything(hosts)
    return one, two


def is_nowhere(hosts, one) -> bool:
    look_at_everything(hosts)
    assert hosts_with(hosts.all, "a") == [] and not one.store.exists("a")
    if isinstance(one.store, TieredStore):
        assert one.store.flush()  # also of what it has learnt and not recorded yet
        assert not one.store.tier.contains_each(one.store.keyspace.keys(["a"])).any()
    return not any(host.cluster.exists("a") for host in hosts.all)


def test_holder_drops_objects_on_disk_of_a_remover_that_died(hosts, holding):
    one, two = holding
    with replaced(two.node.client, "remove", lambda *_: 1 / 0):
        with pytest.raises(ZeroDivisionError):
            two.cluster.remove("a")
    one.node.entries.publish_changes()
    assert not two.cluster.exists("a") and is_nowhere(hosts, one)


def test_removal_while_holders_membership_is_expired_reaches_disk(hosts, holding):
    one, two = holding
    hosts.directory.leave(one.node.name)
    assert not two.cluster.remove("a")  # of whom no one knows just now
    for _ in range(2):
        one.node.entries.publish_all()  # to a directory that does not serve the pool
    one.node.membership._renew_once()
    assert is_nowhere(hosts, one)


def test_object_moved_to_disk_after_its_removal_is_dropped(hosts, holding):
    one, two = holding
    with replaced(two.node.client, "remove", lambda *_: 1 / 0):
        with pytest.raises(ZeroDivisionError):
            two.cluster.remove("a")
    assert one.store.get("a") == value(1)
    if isinstance(one.store, TieredStore):
        to_disk(one.store, "a")
    assert is_nowhere(hosts, one)


def test_restarted_node_drops_removed_objects_from_its_disk(hosts, holding):
    one, two = holding
    one.cluster.close()
    assert not two.cluster.remove("a")  # of which no one knows just now
    again = hosts.make("again", store=one.store)
    two.node.members(anew=True)
    assert is_nowhere(hosts, again)


@pytest.mark.parametrize("is_on_disk", [False, True])
def test_object_put_again_stays(hosts, holding, is_on_disk):
    one, two = holding
    with replaced(two.node.client, "remove", lambda *_: 1 / 0):
        with pytest.raises(ZeroDivisionError):
            two.cluster.remove("a")
    assert one.store.remove("a")  # without telling anybody
    assert one.store.put("a", value(2)) is STORED
    if is_on_disk and isinstance(one.store, TieredStore):
        to_disk(one.store, "a")
    one.node.entries.publish_changes()
    look_at_everything(hosts)
    assert one.store.get("a") == value(2) and two.cluster.get("a") == value(2)
    assert two.cluster.remove("a") and is_nowhere(hosts, one)


def test_copy_moved_to_disk_is_removed(hosts, tmp_path):
    store = with_disk(tmp_path)
    one, two = hosts.make("one", store=store), hosts.make("two")
    two.cluster.put("a", value(1))
    with replaced(hosts.directory, "publish", _not_from(one.node.pool_name)):
        assert one.cluster.fetch(["a"]) == [STORED]
    to_disk(store, "a")
    assert two.cluster.remove("a")
    assert is_nowhere(hosts, one)


def _not_from(pool_name: str):
    def publish(real, name, *args, **options):
        if name == pool_name:
            raise Unavailable("the directory is away")
        return real(name, *args, **options)

    return publish


def test_removal_by_another_local_process_reaches_the_disk(hosts, holding):
    one, two = holding
    with Store.open(one.store.pool.path) as other:
        other.remove("a")
    assert is_nowhere(hosts, one) and not two.cluster.exists("a")
