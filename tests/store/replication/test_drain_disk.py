"""Nodes with a disk behind their pool leave, and take along what only the disk has."""

import threading

import numpy as np
import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import SsdTier, Store, TieredStore
from mooncake_serving.store.replication.draining import drain
from mooncake_serving.store.replication.replicator import Replicator

from ..cluster.support import UNIT, Hosts, replaced, value
from ..directory.conftest import make_world, patient, permanent  # noqa: F401
from ..support import STORED, eventually

IN_POOL = 16  # objects that its pool has room for
NUM = 48


@pytest.fixture
def hosts(make_world):  # noqa: F811
    """Makes hosts, with each kind of directory in turn."""
    before = set(threading.enumerate())
    made = Hosts(make_world().directory)
    yield made
    made.close()
    eventually(lambda: set(threading.enumerate()) <= before, "threads are left")


@pytest.fixture
def with_disk(hosts, tmp_path):
    """Makes a host with a disk, which has all but the last of its objects; some only there."""

    def make(num_objects: int = NUM, path: str | None = None):
        tier = SsdTier(tmp_path / "tier", 64 << 20, bucket_bytes=4 << 20)
        pool = ObjectPool.create(IN_POOL * UNIT, path)
        store = TieredStore(pool, tier, min_uses=1, evict_ratio=0.25)
        one = hosts.make("one", store=store)
        for i in range(num_objects):
            assert one.cluster.put(i, value(i)) is STORED
        assert store.flush(60)
        eventually(lambda: len(only_on_disk(store)) >= num_objects - IN_POOL)
        return one

    return make


def only_on_disk(store: TieredStore) -> set[int]:
    """Which of the objects 0 to NUM - 1."""
    words = store.keyspace.keys(range(NUM))
    is_only = store._disk.contains_each(words) & ~store.pool.contains_each(words)
    return set(np.flatnonzero(is_only).tolist())


def found(host, numbers) -> set[int]:
    """Which objects the cluster has, by this host; each is what was put."""
    values = host.cluster.get_each(list(numbers))
    has = {i for i, got in zip(numbers, values, strict=True) if got is not None}
    assert all(got == value(i) for i, got in zip(numbers, values, strict=True) if i in has)
    return has


def names(hosts) -> set[str]:
    return {member.name for member in hosts.directory.members()}


def test_objects_only_on_disk_are_drained(hosts, with_disk):
    one, two = with_disk(), hosts.make("two", 256 * UNIT)
    num_on_disk = len(only_on_disk(one.store))
    seen = []

    def see(drained) -> None:
        assert drained.failed == {}
        seen.append((drained.num_left, drained.num_on_disk))

    drained = drain(one.node, on_progress=see)
    assert drained.has_left and drained.failed == {}
    assert (drained.num_moved, drained.num_copied) == (NUM, NUM)
    assert (drained.num_left, drained.num_on_disk, drained.num_bytes) == (0, 0, NUM * UNIT)
    # As much at a time as its pool has room for.
    assert seen[0] == (0, num_on_disk) and seen[1] == (0, num_on_disk - IN_POOL)
    assert one.node.name not in names(hosts)
    assert not len(one.store.tier.keys()) and one.store.stats().num_ready == 0
    assert two.store.get_each(range(NUM)) == [value(i) for i in range(NUM)]


def test_most_recently_used_objects_are_moved_when_room_is_short(hosts, with_disk):
    one, two = with_disk(), hosts.make("two", 30 * UNIT)
    kept = list(range(100, 108))
    for i in kept:
        assert two.store.put(i, value(i)) is STORED
    two.node.set_draining(False)  # tells how full it is
    for i in (3, 5):  # of the oldest, which are read again
        assert one.store.get(i) == value(i)
    for i in range(200, 200 + IN_POOL):  # they leave the pool again
        assert one.cluster.put(i, value(i)) is STORED
    assert one.store.flush(60)
    by_use = [3, 5, *sorted(only_on_disk(one.store) - {3, 5}, reverse=True)]
    assert len(by_use) == NUM
    one.store.remove_each(range(200, 200 + IN_POOL))

    drained = drain(one.node)
    assert not drained.has_left and one.node.name in names(hosts) and one.node.is_draining
    moved = {i for i in range(NUM) if two.store.exists(i)}
    assert moved == set(by_use[:22])  # for which it had room
    assert two.store.get_each(kept) == [value(i) for i in kept], "nothing was evicted for them"
    assert (drained.num_moved, drained.num_left) == (22, 0)
    assert drained.num_on_disk == len(drained.failed) == NUM - 22
    assert set(drained.failed.values()) == {"no other pool has room"}
    assert only_on_disk(one.store) == set(range(NUM)) - moved
    assert found(two, range(NUM)) == set(range(NUM))

    hosts.make("three", 256 * UNIT)
    drained = drain(one.node)
    assert drained.has_left and (drained.num_moved, drained.num_on_disk) == (NUM - 22, 0)
    assert found(two, range(NUM)) == set(range(NUM))


def test_draining_a_full_disk_loses_nothing(hosts, tmp_path):
    """A record of each removal would push out what is not moved yet."""
    tier = SsdTier(tmp_path / "tier", 1 << 20, bucket_bytes=128 << 10)
    store = TieredStore(ObjectPool.create(IN_POOL * UNIT), tier, min_uses=1, evict_ratio=0.25)
    one, two = hosts.make("one", store=store), hosts.make("two", 512 * UNIT)
    for i in range(200):
        assert one.cluster.put(i, value(i)) is STORED
    assert store.flush(60) and tier.stats().num_free_buckets == 1
    has = {i for i in range(200) if store.exists(i)}
    num_written = tier.stats().written_bytes
    drained = drain(one.node)
    assert drained.has_left and (drained.num_moved, drained.num_gone) == (len(has), 0)
    assert found(two, has) == has
    assert tier.stats().written_bytes == num_written + 4096 and not len(tier.keys())


def test_objects_with_copies_elsewhere_need_no_room(hosts, with_disk):
    one, two = with_disk(), hosts.make("two", 256 * UNIT)
    Replicator(one.cluster).replicate(range(NUM), 2)
    full = [i for i in range(1000, 1200) if two.store.put(i, value(i), retention="hard") is STORED]
    two.node.set_draining(False)
    before = set(only_on_disk(one.store))
    with replaced(one.store, "bring_up_keys", lambda *_: pytest.fail("it was brought up")):
        drained = drain(one.node)
    assert drained.has_left and len(full) and before
    assert (drained.num_moved, drained.num_copied) == (NUM, 0)
    assert found(two, range(NUM)) == set(range(NUM))


def test_drain_can_leave_the_disk_for_a_restart(hosts, with_disk, tmp_path):
    one, two = with_disk(path=str(tmp_path / "pool")), hosts.make("two", 256 * UNIT)
    before = only_on_disk(one.store)
    drained = drain(one.node, leave_disk=True)
    assert drained.has_left and drained.failed == {}
    assert (drained.num_moved, drained.num_on_disk) == (NUM - len(before), len(before))
    assert only_on_disk(one.store) == before
    assert found(two, range(NUM)) == set(range(NUM)) - before
    one.engine.close()
    hosts.make("again", store=one.store)
    two.node.members(anew=True)
    assert found(two, range(NUM)) == set(range(NUM))


def test_unmovable_object_in_memory_is_not_evicted(hosts, with_disk, monkeypatch):
    """What is brought up evicts nothing: it would be lost, if it was not used enough."""
    one, two = with_disk(), hosts.make("two", 256 * UNIT)
    large = value(7, IN_POOL * UNIT)
    assert one.cluster.put("large", large) is STORED  # there is no room for more
    assert only_on_disk(one.store) == set(range(NUM))
    one.store._demotion._min_uses = 1 << 10
    monkeypatch.setattr(SsdTier, "room_bytes", 0)
    with replaced(one.node.client, "pull", lambda *_, **__: ["FULL"]):
        drained = drain(one.node)
    assert not drained.has_left and (drained.num_left, drained.num_on_disk) == (1, NUM)
    assert one.store.get("large") == large and only_on_disk(one.store) == set(range(NUM))
    assert set(drained.failed.values()) == {
        f"{two.node.name}: FULL",
        "it could not be brought up from the disk",
    }
    # Once more if "large" was still pinned for its reader, in the room that the others need.
    assert any(drain(one.node).has_left for _ in range(3))
    assert two.store.get("large") == large and found(two, range(NUM)) == set(range(NUM))


def test_damaged_object_on_disk_does_not_block_the_drain(hosts, with_disk):
    one, two = with_disk(), hosts.make("two", 256 * UNIT)
    bad = min(only_on_disk(one.store))
    [(first, second)] = one.store.keyspace.keys([bad]).tolist()
    entry = one.store.tier._index.find((first, second))
    with open(one.store.tier.path, "r+b") as file:
        file.seek(entry.record.offset + 4096 + 5)
        file.write(b"\0wrong\0")
    drained = drain(one.node)
    assert drained.has_left and (drained.num_moved, drained.num_gone) == (NUM - 1, 1)
    assert one.store.tier.stats().num_damaged == 1
    assert found(two, range(NUM)) == set(range(NUM)) - {bad}


def test_unreadable_disk_ends_the_drain_after_memory_is_moved(hosts, with_disk):
    one, two = with_disk(), hosts.make("two", 256 * UNIT)
    before = only_on_disk(one.store)

    def late(*_):
        raise TransferError("the disk", "it was not read in time")

    with replaced(one.store.tier, "get_into_each", late), pytest.raises(TransferError):
        drain(one.node)
    assert two.store.exists_each(range(NUM)).sum() == NUM - len(before)
    assert only_on_disk(one.store) == before and one.node.name in names(hosts)
    assert drain(one.node).has_left and found(two, range(NUM)) == set(range(NUM))


def test_drain_stopped_during_the_disk_can_be_resumed(hosts, with_disk):
    one, two = with_disk(), hosts.make("two", 256 * UNIT)
    num_on_disk, stop = len(only_on_disk(one.store)), threading.Event()

    def after_one_batch(drained) -> None:
        if drained.num_on_disk < num_on_disk:
            stop.set()

    drained = drain(one.node, on_progress=after_one_batch, stop=stop)
    assert not drained.has_left and 0 < drained.num_on_disk < num_on_disk
    assert drained.num_on_disk == len(only_on_disk(one.store))
    assert found(two, range(NUM)) == set(range(NUM))
    assert drain(one.node).has_left and found(two, range(NUM)) == set(range(NUM))


def test_pool_served_by_another_node_and_its_disk_stay(hosts, with_disk, tmp_path):
    path = str(tmp_path / "pool")
    one, far = with_disk(path=path), hosts.make("far", 256 * UNIT)
    other = hosts.make("one", store=Store.open(path))
    before = only_on_disk(one.store)
    drained = drain(one.node)
    assert not drained.has_left and (drained.num_moved, drained.num_on_disk) == (0, len(before))
    assert set(drained.failed.values()) == {
        "only its disk has it, and another node serves its pool: drain that one first"
    }
    assert len(drained.failed) == len(before)
    assert drain(other.node).has_left
    assert drain(one.node).has_left
    assert found(far, range(NUM)) == set(range(NUM))


def test_objects_removed_during_a_drain_do_not_return(hosts, with_disk):
    one, two = with_disk(), hosts.make("two", 256 * UNIT)
    gone = sorted(only_on_disk(one.store))[:10]

    def then_removed(original, *args, **options):
        is_up = original(*args, **options)
        for i in gone:
            two.cluster.remove(i)
        return is_up

    with replaced(one.store, "bring_up_keys", then_removed):
        drained = drain(one.node)
    assert drained.has_left
    assert (drained.num_moved, drained.num_gone) == (NUM - len(gone), len(gone))
    assert found(two, range(NUM)) == set(range(NUM)) - set(gone)
