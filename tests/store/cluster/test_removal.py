"""Removed objects stay removed, whatever goes wrong and whoever copies them at that moment."""

import pytest

from mooncake_kernels.errors import FailureKind, TransferError, Unavailable
from mooncake_serving.store import Store
from mooncake_serving.store.cluster.copies import GONE
from mooncake_serving.store.directory import Published
from mooncake_serving.store.replication.replicate import copy_to
from mooncake_serving.store.replication.replicator import Replicator

from ..replication.support import hosts_with
from ..support import STORED
from .support import SomeDirectory, replaced, value


class Forgetful(SomeDirectory):
    """A directory that does what it is told, once, and is away before it says so."""

    def __init__(self, directory, name: str):
        super().__init__(directory)
        self.forgets = name

    def __getattr__(self, name: str):
        call = super().__getattr__(name)
        if name != self.forgets:
            return call

        def fail(*args):
            self.forgets = ""
            call(*args)
            raise Unavailable(f"{name}: the connection is lost")

        return fail


def look_at_everything(hosts) -> None:
    for host in hosts.all:
        if host.store is not None:
            host.node.entries.publish_all()


@pytest.mark.parametrize("looks", [False, True])
def test_removal_completes_though_the_directorys_reply_is_lost(hosts, looks):
    """Then no one was asked to drop it; whoever publishes it again learns that it is removed."""
    one = hosts.make("one")
    two = hosts.make("two", directory=Forgetful(hosts.directory, "remove"))
    one.cluster.put("a", value(1))
    with pytest.raises(Unavailable, match="the connection is lost"):
        two.cluster.remove("a")
    if looks:
        look_at_everything(hosts)
    assert two.cluster.remove("a") is not looks
    look_at_everything(hosts)
    assert hosts_with(hosts.all, "a") == [] and not two.cluster.exists("a")
    assert two.cluster.put("a", value(2)) is STORED and one.cluster.get("a") == value(2)


def test_restarted_node_drops_objects_removed_meanwhile(hosts):
    one, two = hosts.several(2)
    one.cluster.put_each(["a", "b"], [value(1), value(2)])
    one.cluster.close()
    assert not two.cluster.remove("a")  # of which no one knows just now
    again = hosts.make("again", store=one.store)
    two.node.members(anew=True)
    assert two.cluster.get_each(["a", "b"]) == [None, value(2)]
    assert not again.store.exists("a")


@pytest.fixture
def shared(hosts):
    """A host, a store of another process without a node on its pool, and another host."""
    one, two = hosts.several(2)
    with Store.open(one.store.pool.path) as other:
        yield one, other, two


def test_object_put_again_without_a_node_is_found(hosts, shared):
    one, other, two = shared
    for i in range(3):
        assert other.put("a", value(i)) is STORED
        one.node.entries.publish_changes()
        assert two.cluster.get("a") == value(i)
        assert two.cluster.remove("a") and not one.store.exists("a")
    other.put("a", value(7))
    look_at_everything(hosts)
    assert two.cluster.get("a") == value(7)


def test_object_put_again_where_a_copy_was_is_found(hosts, shared):
    one, other, two = shared
    two.cluster.put("a", value(1))
    assert one.cluster.fetch(["a"]) == [STORED]
    assert two.cluster.remove("a") and other.put("a", value(2)) is STORED
    one.node.entries.publish_changes()
    look_at_everything(hosts)
    assert two.cluster.get("a") == value(2)


def test_object_put_again_after_another_process_removed_it_is_found(hosts, shared):
    one, other, two = shared
    one.cluster.put("a", value(1))
    other.remove("a")
    assert not two.cluster.remove("a")  # it is nowhere, though the directory does not know
    other.put("a", value(2))
    look_at_everything(hosts)
    assert two.cluster.get("a") == value(2)


def test_object_put_again_without_membership_stays(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    assert two.cluster.remove("a")

    def leave_then(publish, *args, **options):
        hosts.directory.leave(one.node.name)
        return publish(*args, **options)

    with replaced(hosts.directory, "publish", leave_then):
        assert one.cluster.put("a", value(2)) is STORED
    one.node.membership._renew_once()
    look_at_everything(hosts)
    assert one.store.get("a") == value(2) and two.cluster.get("a") == value(2)


def test_object_put_again_while_its_key_leaves_the_pool_stays(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    two.cluster.fetch(["a"])
    words = one.cluster.keyspace.keys(["a"])
    with one.node.entries.leaving(words) as is_withdrawn:
        assert is_withdrawn.all()
        one.node.entries.publish_all()
        assert two.cluster.remove("a") and not one.store.exists("a")
        assert one.cluster.put("a", value(2)) is STORED
    assert one.store.get("a") == value(2) and two.cluster.get("a") == value(2)
    with one.node.entries.leaving(words):
        hosts.directory.remove(words, 100)
    look_at_everything(hosts)
    assert hosts_with(hosts.all, "a") == [] and not two.cluster.exists("a")


def test_look_before_the_own_copy_is_dropped_does_not_relist_it(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))

    def look_then(remove, keys):
        look_at_everything(hosts)
        return remove(keys)

    with replaced(one.store, "remove_keys", look_then):
        one.cluster.remove("a")
    assert hosts_with(hosts.all, "a") == [] and not two.cluster.exists("a")
    keys = one.cluster.keyspace.keys(["a"])
    answers = hosts.directory.publish(two.node.pool_name, keys, is_copy=True)
    assert answers.tolist() == [Published.REMOVED]


def test_removal_fails_when_own_pool_cannot_be_changed(hosts):
    one, two = hosts.several(2)
    one.cluster.put_each(["a", "b"], [value(1), value(2)])
    two.cluster.fetch(["a", "b"])

    def fail(remove, keys):
        remove(keys[1:])
        raise OSError("a stopped process guards the pool")

    with replaced(one.store, "remove_keys", fail):
        with pytest.raises(Unavailable, match="not removed everywhere: a stopped process"):
            one.cluster.remove_each(["a", "b"])
    assert hosts_with(hosts.all, "a") == ["host-0"] and hosts_with(hosts.all, "b") == []
    assert two.cluster.get("a") == value(1)


@pytest.mark.parametrize("look", ["publish_changes", "publish_all"])
def test_object_put_again_during_a_look_stays_listed(hosts, look):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))

    def put_again(list_objects):
        listed = list_objects()
        assert two.cluster.remove("a") and one.cluster.put("a", value(2)) is STORED
        return listed

    with replaced(one.store, "list_objects", put_again):
        getattr(one.node.entries, look)()
    assert two.cluster.get("a") == value(2)
    for again in ("publish_changes", "publish_all"):
        getattr(one.node.entries, again)()
        assert two.cluster.get("a") == value(2)


def test_object_put_just_before_its_key_leaves_the_pool_stays(hosts):
    one, two = hosts.several(2)
    words = one.cluster.keyspace.keys(["a"])
    hosts.directory.remove(words, 100)
    one.store.put("a", value(2))
    with one.node.entries.leaving(words):
        one.node.entries.publish(words)  # as the thread does that has put it
    assert two.cluster.get("a") == value(2) and not one.node.entries._put_leaving


def test_failed_drop_is_retried_by_the_next_look(hosts, monkeypatch):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    hosts.directory.remove(one.cluster.keyspace.keys(["a"]), 100)

    def fail(*_):
        raise OSError("a stopped process guards the pool")

    with monkeypatch.context() as patch:
        patch.setattr(one.store.pool, "remove_exactly", fail)
        one.node.entries.publish_all()
    assert one.store.exists("a") and not two.cluster.exists("a") and one.node.entries.is_stale
    one.node.entries.publish_all()
    assert not one.store.exists("a") and not two.cluster.exists("a")


def removing(remover, key, looker=None):
    """Reads objects, of which one is removed when it has been read, and everybody looks."""

    def read(read, *args, **options):
        outcomes = read(*args, **options)
        if remover.cluster.exists(key):
            assert remover.cluster.remove(key)
        if looker is not None:
            looker.node.entries.publish_changes()
            looker.node.entries.publish_all()
        return outcomes

    return read


@pytest.mark.parametrize("looks", [False, True])
def test_removal_during_a_fetch_leaves_no_copy(hosts, looks):
    one, two, three = hosts.several(3)
    one.cluster.put_each(["a", "b"], [value(1), value(2)])
    looker = two if looks else None
    with replaced(two.node.reads, "read_from", removing(three, "a", looker)):
        assert two.cluster.fetch(["a", "b"]) == [None, STORED]
    assert hosts_with(hosts.all, "a") == [] and not three.cluster.exists("a")
    assert hosts_with(hosts.all, "b") == ["host-0", "host-1"]
    look_at_everything(hosts)
    assert not three.cluster.exists("a") and two.store.get("b") == value(2)
    assert two.cluster.view("a") is None
    assert three.cluster.put("a", value(3)) is STORED and one.cluster.get("a") == value(3)


@pytest.mark.parametrize("looks", [False, True])
def test_removal_during_a_copy_leaves_no_copy(hosts, looks):
    one, two, three = hosts.several(3)
    one.cluster.put("a", value(1))
    looker = two if looks else None
    with replaced(two.node.reads, "read_from", removing(three, "a", looker)):
        copied = Replicator(one.cluster).copy(["a"], two.node.name)
    assert copied.failed == {0: f"{two.node.name}: it was removed meanwhile"}
    assert hosts_with(hosts.all, "a") == [] and not three.cluster.exists("a")


def test_removal_by_another_thread_of_the_copier_leaves_no_copy(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    with replaced(two.node.reads, "read_from", removing(two, "a", two)):
        assert two.cluster.fetch(["a"]) == [None]
    look_at_everything(hosts)
    assert hosts_with(hosts.all, "a") == [] and not one.cluster.exists("a")


def test_copier_that_fails_before_publishing_leaves_no_copy(hosts):
    """What has come nevertheless is no put."""
    one, two, three = hosts.several(3)
    one.cluster.put_each(["a", "b"], [value(1), value(2)])

    def fail(read, *args, **options):
        removing(three, "a")(read, *args, **options)
        raise Unavailable("the directory is away")

    with replaced(two.node.reads, "read_from", fail):
        with pytest.raises(Unavailable):
            two.cluster.fetch(["a", "b"])
    assert two.store.exists("a") and two.store.exists("b")
    two.node.entries.publish_changes()
    assert hosts_with(hosts.all, "a") == [] and not one.cluster.exists("a")
    assert hosts_with(hosts.all, "b") == ["host-0", "host-1"]
    assert not len(two.node.entries.copies.here()) and not two.node.entries.copies._coming


def test_removal_while_holders_copy_from_each_other(hosts):
    """Who has dropped it has it again when the other one is asked."""
    one, two, three = hosts.several(3)
    one.cluster.put("a", value(1))
    two.cluster.fetch(["a"])
    asked = []

    def copy_again(remove, member, keys):
        if asked:
            [first] = [host for host in (one, two) if host.node.name == asked[0]]
            [second] = [host for host in (one, two) if host.node.name == member]
            first.node.locations.remember(keys, [(second.node.pool_name,)])
            assert first.cluster.get("a") == value(1)  # it is still there
            pools = [[second.node.pool_name]]
            assert copy_to(first.node, member_of(first), keys, pools, []) == [GONE]
        asked.append(member)
        return remove(member, keys)

    def member_of(host):
        return host.node.member(host.node.name)

    with replaced(three.node.client, "remove", copy_again):
        assert three.cluster.remove("a")
    assert len(asked) == 2
    assert hosts_with(hosts.all, "a") == [] and not three.cluster.exists("a")


def test_holders_are_asked_after_the_directory(hosts):
    one, two, three = hosts.several(3)
    one.cluster.put("a", value(1))
    two.cluster.fetch(["a"])
    order = []

    def record(remove, *args):
        order.append("directory")
        return remove(*args)

    def ask(remove, member, keys):
        order.append("holder")
        return remove(member, keys)

    with replaced(hosts.directory, "remove", record), replaced(three.node.client, "remove", ask):
        assert three.cluster.remove("a")
    assert order == ["directory", "holder", "holder"]
    assert hosts_with(hosts.all, "a") == []


def test_unreached_holders_are_named_and_the_others_asked(hosts):
    one, two, three = hosts.several(3)
    one.cluster.put("a", value(1))
    two.cluster.fetch(["a"])

    def fail(remove, member, keys):
        if member == two.node.name:
            raise TransferError(member, "drop: no answer in 5 s", kind=FailureKind.TIMED_OUT)
        return remove(member, keys)

    with replaced(three.node.client, "remove", fail):
        with pytest.raises(Unavailable, match=f"not removed everywhere: .*{two.node.name}.* 5 s"):
            three.cluster.remove("a")
    assert hosts_with(hosts.all, "a") == ["host-1"] and three.cluster.get("a") == value(1)
    assert three.cluster.remove("a") and hosts_with(hosts.all, "a") == []


def test_a_copy_is_kept_and_published_later_if_the_directory_is_away(hosts):
    away = SomeDirectory(hosts.directory)
    one, two = hosts.make("one"), hosts.make("two", directory=away)
    two.node.membership.refresh()
    one.cluster.put("a", value(1))

    def read(read, *args, **options):
        outcomes = read(*args, **options)
        away.is_away = True
        return outcomes

    with replaced(two.node.reads, "read_from", read):
        assert two.cluster.fetch(["a"]) == [STORED]
    away.is_away = False
    assert two.node.entries.is_stale
    two.node.entries.publish_all()
    assert one.store.remove("a") and two.store.get("a") == value(1)
    assert two.node.pool_name in hosts.directory.holders(one.cluster.keyspace.keys(["a"]))[0]
