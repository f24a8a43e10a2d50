"""Copies on several hosts: made with a put and later, moved, given up, replaced."""

import threading
from functools import partial

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.store import HotKeys, drain
from mooncake_serving.store.replication import replicate as replicate
from mooncake_serving.store.replication.placement import Placement
from mooncake_serving.store.replication.replicate import ReplicaChange
from mooncake_serving.store.replication.replicator import Replicator, Stored

from ...threads import in_threads
from ..cluster.support import UNIT, SomeDirectory, kept_by, replaced, value
from ..support import EXISTS, STORED
from .support import die, forget, hosts_with, pools_of


def test_put_with_replicas(hosts):
    made = hosts.several(3)
    copies = Replicator(made[0].cluster)
    assert copies.put("a", value(1), replicas=2) == Stored(STORED, 2)
    assert len(hosts_with(made, "a")) == 2 and "host-0" in hosts_with(made, "a")
    assert copies.put("b", value(2), replicas=9) == Stored(STORED, 3)
    assert hosts_with(made, "b") == ["host-0", "host-1", "host-2"]
    assert [host.store.get("b") for host in made] == [value(2)] * 3
    assert copies.put("a", value(3), replicas=3) == Stored(EXISTS, 3)
    assert [host.store.get("a") for host in made] == [value(1)] * 3
    pools = {host.node.pool_name for host in made}
    assert pools_of(hosts.directory, made[0], "a") == pools


def test_replicas_keep_the_retention(hosts):
    made = hosts.several(3)
    one = made[0]
    copies = Replicator(one.cluster)
    assert copies.put("a", value(1), replicas=3, retention="hard") == Stored(STORED, 3)
    assert copies.put_each(["b", "c"], [b"1", b"2"], replicas=3, retention="soft")[1][1] == 3
    assert [kept_by(host.store, ["a", "b", "c"]) for host in made] == [[(2, 0), (1, 0), (1, 1)]] * 3
    one.cluster.put("d", value(4))
    copies.replicate(["d"], 3, retention="soft")
    assert [kept_by(host.store, ["d"]) for host in made] == [[(0, 0)], [(1, 0)], [(1, 0)]]
    with pytest.raises(InvalidArgument, match="retention must be"):
        copies.replicate(["d"], 3, retention="long")


def test_moved_objects_keep_retention_and_position(hosts):
    one, two, three = hosts.several(3)
    copies = Replicator(one.cluster)
    for key, retention in (("a", "hard"), ("b", "soft"), ("c", "normal")):
        one.cluster.put(key, value(1), retention=retention, position=5)
    names = ["a", "b", "c"]
    assert copies.move(names, one.node.name, two.node.name).failed == {}
    assert kept_by(two.store, names) == [(2, 5), (1, 5), (0, 5)]
    assert copies.copy(names, three.node.name).failed == {}  # of others it is not known
    assert kept_by(three.store, names) == [(0, 0)] * 3
    one.cluster.put("d", value(1), retention="hard")
    three.cluster.fetch(["d"])  # as a copy that may go
    assert copies.change_replica(["d"], remove=[one.node.name]).failed == {}
    assert kept_by(three.store, ["d"]) == [(2, 0)]


def test_batch_put_with_replicas_of_many_sizes(hosts):
    made = hosts.several(4, 1024 * UNIT)
    blocks = [value(i, 1 + 37 * i) for i in range(300)]
    stored = Replicator(made[0].cluster).put_each(list(range(300)), blocks, replicas=3)
    assert stored == [Stored(STORED, 3)] * 300
    for host in made[1:]:
        assert host.cluster.get_each(list(range(300))) == blocks
        assert host.store.stats().num_ready >= 100  # spread over all


def test_another_host_is_preferred_to_another_pool_of_the_same_host(hosts):
    one = hosts.make("one")
    beside = hosts.make("one", 1024 * UNIT)  # emptier than
    other = hosts.make("other")
    copies = Replicator(one.cluster)
    assert copies.put("a", value(1), replicas=2) == Stored(STORED, 2)
    assert other.store.exists("a") and not beside.store.exists("a")
    assert copies.put("a", value(1), replicas=3) == Stored(EXISTS, 3)
    assert beside.store.exists("a")


def test_node_without_a_pool_puts_replicas(hosts):
    one, two = hosts.several(2)
    none = hosts.make("none", 0)
    assert Replicator(none.cluster).put("a", value(1), replicas=2) == Stored(STORED, 2)
    assert one.store.get("a") == two.store.get("a") == value(1)


def test_pools_without_room_are_skipped_or_evict(hosts):
    one, two, three = hosts.several(3)
    for host in (two, three):
        for i in range(64):
            assert host.store.put(f"{host.node.host}/{i}", value(i), retention="hard") is STORED
    copies = Replicator(one.cluster)
    assert copies.put("a", value(1), replicas=2) == Stored(STORED, 1)
    copied = copies.replicate(["a"], 2)
    assert copied.num_copies.tolist() == [1] and "FULL" in copied.failed[0]
    assert two.store.retain("host-1/7", "normal")
    assert copies.replicate(["a"], 2).num_copies.tolist() == [2]
    assert two.store.exists("a") and not two.store.exists("host-1/7")
    never = Replicator(one.cluster, Placement())
    three.node.set_draining(False)  # tells how full it is
    assert three.store.retain("host-2/7", "normal")
    assert never.put("b", value(2), replicas=3).num_copies < 3
    assert three.store.exists("host-2/7")


def test_replicate_existing_objects(hosts):
    made = hosts.several(4)
    for i in range(20):
        made[i % 3].cluster.put(i, value(i))
    copies = Replicator(made[3].cluster)
    copied = copies.replicate([*range(20), 99], 2)
    assert copied.num_copies.tolist() == [2] * 20 + [0] and copied.num_made == 20
    assert copied.failed == {20: "no living pool has it"}
    assert all(len(hosts_with(made, i)) == 2 for i in range(20))
    assert copies.replicate(range(20), 2).num_made == 0


def test_large_batches_are_split(hosts, monkeypatch):
    one, two = hosts.several(2)
    monkeypatch.setattr(replicate, "BATCH_BYTES", 3 * UNIT)
    monkeypatch.setattr(replicate, "BATCH_KEYS", 8)
    sizes = [UNIT, UNIT, UNIT, UNIT, 5 * UNIT, UNIT, 0, UNIT, UNIT, UNIT]
    asked = []

    def pull(original, member, words, *rest, **options):
        asked.append(len(words))
        return original(member, words, *rest, **options)

    with replaced(one.node.client, "pull", pull):
        blocks = [value(i, size) for i, size in enumerate(sizes)]
        stored = Replicator(one.cluster).put_each(list(range(10)), blocks, replicas=2)
    assert stored == [Stored(STORED, 2)] * 10 and asked == [3, 1, 1, 3, 2]
    assert two.store.get_each(range(10)) == blocks


def test_source_that_lost_the_object_is_skipped(hosts):
    made = hosts.several(4)
    assert Replicator(made[0].cluster).put("a", value(1), replicas=3).num_copies == 3
    holders = [host for host in made if host.store.exists("a")]
    last = next(host for host in made if host not in holders)
    for host in holders[:2]:
        assert host.store.remove("a")  # and no one is notified
    copied = Replicator(made[0].cluster).copy(["a"], last.node.name)
    assert copied.failed == {} and last.store.get("a") == value(1)


def test_copies_are_added_and_removed_by_name(hosts):
    made = hosts.several(4)
    names = [host.node.name for host in made]
    keys = list(range(10))
    assert made[0].cluster.put_each(keys, [value(i) for i in keys]) == [STORED] * 10
    for asking in (made[0], made[3]):  # a holder, and one that has nothing to do with it
        copies = Replicator(asking.cluster)
        changed = copies.change_replica(keys, add=names[1:3], remove=names[:1])
        assert changed.failed == {} and changed.num_copies.tolist() == [2] * 10
        assert changed.num_made == 20
        assert all(hosts_with(made, i) == ["host-1", "host-2"] for i in keys)
        changed = copies.change_replica(keys, add=names[:1], remove=names[1:3])
        assert changed.failed == {} and changed.num_copies.tolist() == [1] * 10
        assert all(hosts_with(made, i) == ["host-0"] for i in keys)
    assert made[2].cluster.get_each(keys) == [value(i) for i in keys]


def test_duplicate_keys_are_one_object(hosts):
    made = hosts.several(3)
    one, two, three = made
    copies = Replicator(one.cluster)
    keys = [1, 2, 1, 1]
    one.cluster.put_each([1, 2], [value(1), value(2)])
    copied = copies.copy(keys, two.node.name)
    assert (copied.num_copies.tolist(), copied.num_made, copied.failed) == ([2] * 4, 2, {})
    copied = copies.move(keys, one.node.name, three.node.name)
    assert (copied.num_copies.tolist(), copied.num_made, copied.failed) == ([2] * 4, 2, {})
    assert hosts_with(made, 1) == hosts_with(made, 2) == ["host-1", "host-2"]
    copied = copies.change_replica([9, 1, 9], remove=[two.node.name])
    assert copied.num_copies.tolist() == [0, 1, 0]
    assert copied.failed == {0: "no living pool has it", 2: "no living pool has it"}
    copied = copies.replicate(keys, 2)
    assert (copied.num_copies.tolist(), copied.num_made, copied.failed) == ([2] * 4, 1, {})
    assert copies.put_each([3, 3], [value(3)] * 2, replicas=2) == [(STORED, 2), (EXISTS, 2)]
    assert len(hosts_with(made, 1)) == len(hosts_with(made, 3)) == 2


@pytest.mark.parametrize("is_move", [False, True])
def test_concurrent_give_ups_keep_one_copy(hosts, is_move):
    made = hosts.several(2)
    names = [host.node.name for host in made]
    copies = [Replicator(host.cluster) for host in made]

    def give_up(i: int, key: int) -> None:
        add = [names[1 - i]] if is_move else []
        copies[i].change_replica([key], add=add, remove=[names[i]])

    for key in range(50):
        assert copies[0].put(key, value(key, 64), replicas=2) == Stored(STORED, 2)
        in_threads(*(partial(give_up, i, key) for i in range(2)))
        holders = hosts_with(made, key)
        assert holders
        listed = pools_of(hosts.directory, made[0], key)
        assert listed == {h.node.pool_name for h in made if h.node.host in holders}


def test_give_up_notices_the_loss_of_the_other_copy(hosts):
    """The other one goes between the first look at the directory and the removal."""
    one, two = hosts.several(2)
    copies = Replicator(one.cluster)
    assert copies.put("a", value(1), replicas=2) == Stored(STORED, 2)
    words = one.cluster.keyspace.keys(["a"])
    change = ReplicaChange(one.node, words, hosts.directory.members())
    with two.node.entries.leaving(words):
        two.node.entries.publish_all()  # as a renewal may
        changed = change.run([], [one.node.pool_name])
    assert changed.failed == {0: "it is the last copy"}
    assert hosts_with([one, two], "a") == ["host-0", "host-1"]
    pools = {host.node.pool_name for host in (one, two)}
    assert pools_of(hosts.directory, one, "a") == pools


@pytest.mark.parametrize("is_told", [False, True])
def test_object_given_up_by_two_holders_stays_listed(hosts, is_told):
    """Each of two holders, or who tells them, looks for the other's copy, which just goes."""
    one, two, three = hosts.several(3)
    one.cluster.put("a", value(1))
    two.cluster.fetch(["a"])
    words = one.cluster.keyspace.keys(["a"])
    movers = (three, three) if is_told else (one, two)
    first, second = (ReplicaChange(m.node, words, hosts.directory.members()) for m in movers)
    listed, changed = [], []

    def look(holders, indices):
        listed.append(pools_of(hosts.directory, one, "a"))
        return holders(indices)

    def meanwhile(confirm, *args):
        with replaced(second, "_holders", look):
            changed.append(second.run([], [two.node.pool_name]))
        return confirm(*args)

    with replaced(first, "_confirm", meanwhile), replaced(first, "_holders", look):
        changed.append(first.run([], [one.node.pool_name]))
    assert all(listed) and len(listed) >= 4
    assert [change.failed for change in changed] == [{0: "it is the last copy"}, {}]
    assert hosts_with(hosts.all, "a") == ["host-1"]
    assert pools_of(hosts.directory, one, "a") == {two.node.pool_name}


@pytest.mark.parametrize("is_told", [False, True])
def test_object_removed_during_a_give_up_is_gone(hosts, is_told):
    one, two, three = hosts.several(3)
    one.cluster.put("a", value(1))
    two.cluster.fetch(["a"])
    words = one.cluster.keyspace.keys(["a"])
    mover = three if is_told else one
    change = ReplicaChange(mover.node, words, hosts.directory.members())

    def removed(confirm, *args):
        assert three.cluster.remove("a")
        return confirm(*args)

    with replaced(change, "_confirm", removed):
        assert change.run([], [one.node.pool_name]).failed
    assert hosts_with(hosts.all, "a") == [] and not three.cluster.exists("a")
    assert two.cluster.put("a", value(2)) is STORED and one.cluster.get("a") == value(2)


def test_last_copy_evicted_during_a_give_up_is_not_listed(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    words = one.cluster.keyspace.keys(["a"])
    with one.node.entries.leaving(words) as is_withdrawn:
        assert not is_withdrawn.any() and two.cluster.exists("a")
        one.store.remove("a")  # and no one is notified
    assert not two.cluster.exists("a")


def test_the_last_copy_is_never_removed(hosts):
    one, two, three = hosts.several(3)
    assert Replicator(one.cluster).put("a", value(1), replicas=2).num_copies == 2
    holder = two if two.store.exists("a") else three
    copies = Replicator(three.cluster)
    both = [one.node.name, holder.node.name]
    changed = copies.change_replica(["a"], remove=both)
    assert changed.failed == {0: "it is the last copy"} and changed.num_copies.tolist() == [2]
    assert holder.store.remove("a")  # and the directory is not notified
    changed = copies.change_replica(["a"], remove=both[:1])
    assert changed.failed == {} and changed.num_copies.tolist() == [1]
    assert holder.store.get("a") == value(1)  # it was asked first, and took it again
    assert not one.store.exists("a")


def test_move_never_reduces_the_number_of_copies(hosts):
    one, two, three = hosts.several(3)
    keys = list(range(30))
    one.cluster.put_each(keys, [value(i) for i in keys])
    node = three.node
    seen = []

    def drop(original, member, words):
        assert member == one.node.name
        assert two.store.pool.contains_each(words).all()
        assert one.store.pool.contains_each(words).all()
        seen.append(len(words))
        return original(member, words)

    with replaced(node.client, "drop", drop):
        moved = Replicator(three.cluster).move(keys, one.node.name, two.node.name)
    assert moved.failed == {} and seen == [30]
    assert one.store.stats().num_ready == 0 and two.store.stats().num_ready == 30
    assert three.cluster.get_each(keys) == [value(i) for i in keys]


@pytest.mark.parametrize("target", ["host-1", "host-2"])
@pytest.mark.parametrize("call", ["get", "get_into", "fetch", "view"])
def test_object_moved_during_a_lookup_is_found(hosts, call, target):
    """The directory has said where it is, and there it is no more, but elsewhere, or here."""
    one, two, three = hosts.several(3)
    to = two if target == "host-1" else three
    one.cluster.put("a", value(1))
    moves, is_moving = [], threading.Lock()

    def moved(read, *args, **options):
        if is_moving.acquire(blocking=False):  # once, and the move may read, too
            moves.append(Replicator(one.cluster).move(["a"], one.node.name, to.node.name))
        return read(*args, **options)

    with replaced(three.node.reads, "read_from", moved):
        if call == "get":
            assert three.cluster.get("a") == value(1)
        elif call == "get_into":
            into = np.zeros(100, np.uint8)
            assert three.cluster.get_into("a", into, offset=50) == UNIT
            assert bytes(into) == value(1)[50:150]
        elif call == "fetch":
            assert three.cluster.fetch(["a"]) == [STORED if to is two else EXISTS]
        else:
            with three.cluster.view("a") as seen:
                assert bytes(seen.view) == value(1)
    assert moves[0].failed == {} and not one.store.exists("a") and to.store.exists("a")


def test_move_that_cannot_copy_removes_nothing(hosts):
    one, two = hosts.several(2)
    small = hosts.make("small", 4 * UNIT)
    for i in range(4):
        small.store.put(f"mine/{i}", value(i), retention="hard")
    one.cluster.put("a", value(1))
    moved = Replicator(two.cluster).move(["a"], one.node.name, small.node.name)
    assert "FULL" in moved.failed[0] and moved.num_copies.tolist() == [1]
    assert one.store.get("a") == value(1)
    small.node.set_draining(True)
    moved = Replicator(two.cluster).move(["a"], one.node.name, small.node.name)
    assert "draining" in moved.failed[0] and one.store.get("a") == value(1)


def test_move_to_a_dead_target_fails(hosts):
    one, two, dead = hosts.several(3)
    one.cluster.put("a", value(1))
    die(dead)
    moved = Replicator(one.cluster).move(["a"], one.node.name, dead.node.name)
    assert moved.failed and one.store.get("a") == value(1)
    assert Replicator(one.cluster).put("b", value(2), replicas=2).num_copies == 2
    assert two.store.get("b") == value(2)


def test_replicated_objects_survive_the_loss_of_a_host(hosts):
    made = hosts.several(4)
    keys = list(range(40))
    blocks = [value(i) for i in keys]
    for i in keys:
        assert Replicator(made[i % 4].cluster).put(i, blocks[i], replicas=2).num_copies == 2
    die(made[1])
    for host in (made[0], made[2], made[3]):  # the directory still names the dead one
        assert host.cluster.get_each(keys) == blocks
    forget(hosts.directory, made[1])
    for host in (made[0], made[2], made[3]):
        assert host.cluster.match_prefix(keys) == 40
        assert host.cluster.get_each(keys) == blocks


def test_repair_restores_copies_of_a_dead_host(hosts):
    made = hosts.several(4, 256 * UNIT)
    keys = list(range(60))
    for i in keys:
        assert Replicator(made[i % 4].cluster).put(i, value(i), replicas=2).num_copies == 2
    made[1].cluster.put("alone", value(99))
    die(made[1])
    forget(hosts.directory, made[1])
    living = [made[0], made[2], made[3]]
    lost = sum(len(hosts_with(living, i)) < 2 for i in keys)
    assert lost > 0
    repaired = Replicator(made[2].cluster).repair(2)
    assert (repaired.num_made, repaired.failed) == (lost, {})
    assert repaired.num_objects == 60
    assert all(len(hosts_with(living, i)) == 2 for i in keys)
    assert [host.cluster.get_each(keys) for host in living] == [[value(i) for i in keys]] * 3
    assert made[0].cluster.get("alone") is None  # it had no other copy
    assert Replicator(made[0].cluster).repair(2).num_made == 0


def test_concurrent_repairs_are_safe(hosts):
    made = hosts.several(3, 256 * UNIT)
    for i in range(60):
        made[i % 3].cluster.put(i, value(i))
    in_threads(*(partial(Replicator(host.cluster).repair, 2) for host in made))
    assert all(len(hosts_with(made, i)) >= 2 for i in range(60))
    assert made[0].cluster.get_each(range(60)) == [value(i) for i in range(60)]


def test_failures_of_a_repair_are_reported(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    repaired = Replicator(two.cluster).repair(3)
    key = tuple(one.cluster.keyspace.keys(["a"])[0].tolist())
    assert repaired.num_made == 1 and list(repaired.failed) == [key]


def test_copies_without_the_directory_are_unavailable(hosts):
    directory = SomeDirectory(hosts.directory)
    one = hosts.make("one", directory=directory)
    hosts.make("two")
    one.cluster.put("a", value(1))
    copies = Replicator(one.cluster)
    claim = directory._directory.claim

    def claim_and_go(*args):
        directory.is_away = True
        return claim(*args)

    directory.claim = claim_and_go
    assert copies.put("b", value(2), replicas=2) == Stored(STORED, 1)
    with pytest.raises(Unavailable):
        copies.replicate(["a"], 2)
    with pytest.raises(Unavailable):
        copies.repair(2)
    assert one.store.get("b") == value(2)
    directory.is_away = False
    assert copies.replicate(["a"], 2).num_copies.tolist() == [2]


def test_departed_member_is_unavailable_not_invalid(hosts):
    """The directory may have forgotten it just now."""
    one, two = hosts.several(2)
    none = hosts.make("none", 0)
    one.cluster.put("a", value(1))
    copies = Replicator(one.cluster)
    for gone in (one, two, none):
        hosts.directory.leave(gone.node.name)
    one.node.members(anew=True)
    for call in (
        lambda: copies.copy(["a"], two.node.name),
        lambda: copies.change_replica(["a"], remove=[one.node.name]),
    ):
        with pytest.raises(Unavailable, match="is no member now"):
            call()
    with pytest.raises(InvalidArgument, match="add must be members with pools"):
        copies.copy(["a"], none.node.name)


def test_wrong_arguments_are_named(hosts):
    one, two = hosts.several(2)
    copies = Replicator(one.cluster)
    for call, message in [
        (lambda: copies.put("a", b"", replicas=0), "replicas must be an integer from 1 on, got 0"),
        (lambda: copies.replicate(["a"], 0.5), "num_copies must be an integer from 1 on, got 0.5"),
        (lambda: copies.repair(0), "repair: num_copies must be an integer from 1 on, got 0"),
        (lambda: copies.copy(["a"], "nobody"), "add must be members with pools, got 'nobody'"),
        (lambda: copies.change_replica(["a"], remove="x"), "remove must be a sequence of names"),
        (lambda: copies.change_replica(["a"], add=None), "add must be a sequence of names, got No"),
        (lambda: copies.move(["a"], [], "x"), r"add must be members with pools, got 'x'"),
        (lambda: copies.move(["a"], [], two.node.name), r"remove must be members with .* got \[\]"),
        (lambda: Replicator(one.node), "Replicator: cluster must be a ClusterStore, got <"),
        (
            lambda: Replicator(one.cluster, "near"),
            "Replicator: placement must be a Placement, got 'near'",
        ),
        (lambda: drain(one.cluster), "drain: node must be a Node, got <"),
        (lambda: drain(one.node, placement=3), "drain: placement must be a Placement, got 3"),
        (lambda: drain(one.node, on_progress=3), "drain: on_progress must be a function, got 3"),
        (lambda: HotKeys(clock=3), "HotKeys: clock must be a function, got 3"),
        (lambda: copies.move(["a"], two.node.name, two.node.name), "of other pools than remove"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            call()
    assert np.all(copies.replicate([], 2).num_copies == [])
