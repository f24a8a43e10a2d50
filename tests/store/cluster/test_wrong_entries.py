"""The directory lists what a pool does not have, or the other way round, and somebody notices."""

import threading

import pytest

from mooncake_kernels.errors import TransferError
from mooncake_serving.store import Store
from mooncake_serving.store.cluster import reads

from ..support import EXISTS, STORED, eventually
from .support import replaced, value


@pytest.mark.parametrize("by_key", [True, False])
def test_object_put_during_a_read_stays_listed(hosts, by_key):
    one, two, three = hosts.several(3, by_key=by_key)
    one.cluster.put("a", value(1))
    assert two.cluster.exists("a") and one.cluster.remove("a")  # and two remembers where it was
    looked_at = []

    def put_again(read, *args, **options):
        found = read(*args, **options)
        if not one.store.exists("a"):
            assert one.cluster.put("a", value(2)) is STORED
        return found

    def look(withdraw_gone, keys):
        looked_at.append(keys)
        return withdraw_gone(keys)

    with replaced(one.node.entries, "withdraw_gone", look):
        with replaced(two.node.reads, "_read_group", put_again):
            assert two.cluster.get("a") == value(2)
        assert three.cluster.exists("a") and three.cluster.get("a") == value(2)
        eventually(lambda: looked_at)
    assert three.cluster.exists("a") and three.cluster.get("a") == value(2)
    assert three.cluster.remove("a") and one.cluster.get("a") is None
    assert three.cluster.put("a", value(3)) is STORED and one.cluster.get("a") == value(3)


@pytest.mark.parametrize("by_key", [True, False])
def test_objects_missing_at_their_holder_are_withdrawn(hosts, by_key, monkeypatch):
    monkeypatch.setattr(reads, "STORED_S", 0.0)  # it asks again while they are listed
    one, two = hosts.make("one"), hosts.make("two", by_key=by_key)
    one.cluster.put_each(range(3), [value(i) for i in range(3)])
    for key in range(2):
        one.store.remove(key)  # and no one was notified
    posted = []

    def post(post, name, message, deadline_s):
        posted.append(name)
        return post(name, message, deadline_s)

    with replaced(two.node._rpc, "post", post):
        assert two.cluster.get_each(range(3)) == [None, None, value(2)]
    assert posted.count(one.node.name) <= 2  # of all objects; and the release of what was pinned
    eventually(lambda: not two.cluster.exists_each(range(2)).any())
    assert two.cluster.put(0, value(0)) is STORED and two.cluster.exists(2)


def test_a_holder_that_cannot_be_notified_finds_it_by_itself(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    one.store.remove("a")

    def fail(post, name, *_):
        raise TransferError(name, "connection refused")

    with replaced(two.node._rpc, "post", fail):
        assert two.cluster.get("a") is None and two.cluster.exists("a")
    one.node.entries.publish_changes()
    assert not two.cluster.exists("a")


def test_object_put_by_another_process_stays_listed(hosts):
    """The node that is notified of it has just seen that it is gone."""
    one, two = hosts.several(2)
    again = hosts.make("again", store=Store.open(one.store.pool.path))
    one.cluster.put("a", value(1))
    one.store.remove("a")

    def put_then(withdraw, keys):
        assert again.store.put("a", value(2)) is STORED
        again.node.entries.publish(keys)
        return withdraw(keys)

    words = one.cluster.keyspace.keys(["a"])
    with replaced(one.node.entries, "withdraw", put_then):
        one.node.entries.withdraw_gone(words)
    assert two.cluster.exists("a") and two.cluster.get("a") == value(2)


def test_put_waits_for_withdrawal_of_the_previous_object(hosts):
    one, two = hosts.several(2)
    words = one.cluster.keyspace.keys(["a"])
    results = []
    putter = threading.Thread(target=lambda: results.append(one.cluster.put("a", value(1))))

    def withdraw_late(withdraw, *args):
        putter.start()
        eventually(lambda: two.cluster.exists("a"))
        putter.join(0.3)  # it does not end
        withdraw(*args)
        assert putter.is_alive() and not two.cluster.exists("a")

    with replaced(hosts.directory, "withdraw", withdraw_late):
        assert one.node.entries.withdraw_gone(words).all()
    putter.join()
    assert results == [STORED] and two.cluster.get("a") == value(1)


@pytest.mark.parametrize("retention", ["normal", "soft"])
def test_put_racing_with_removal_leaves_no_entry_or_claim(hosts, retention):
    """It is neither listed for that, nor does the claim to it stay. (An engine answers, or, for a
    "soft" one, its node.)
    """
    one, two = hosts.several(2)
    none = hosts.make("none", 0)
    one.cluster.put("a", value(1))
    two.node.set_draining(True)  # so none asks the other
    none.node.members(anew=True)
    results = []

    def put_before(remove, member, keys):
        results.append(none.cluster.put("a", value(2), retention=retention))
        return remove(member, keys)

    with replaced(two.node.client, "remove", put_before):
        assert two.cluster.remove("a")
    two.node.set_draining(False)
    assert results == [EXISTS] and not none.cluster.exists("a")
    assert two.cluster.put("a", value(3)) is STORED and none.cluster.get("a") == value(3)


@pytest.mark.parametrize("retention", ["normal", "soft"])
def test_put_lists_an_existing_unlisted_object(hosts, retention):
    """Such as what a process without a node has put."""
    one, none = hosts.make("one"), hosts.make("none", 0)
    two = hosts.make("two", 0)
    one.store.put("a", value(1))
    assert not none.cluster.exists("a")
    assert none.cluster.put("a", value(1), retention=retention) is EXISTS
    assert none.cluster.exists("a") and two.cluster.get("a") == value(1)
    assert two.cluster.remove("a") and two.cluster.put("a", value(2)) is STORED


@pytest.mark.parametrize("retention", ["normal", "soft"])
def test_object_put_again_without_a_node_is_not_dropped(hosts, retention):
    """A node without a pool puts it, too, before the holder has looked."""
    one, none = hosts.make("one"), hosts.make("none", 0)
    none.cluster.put("a", value(1))
    assert none.cluster.remove("a") and one.store.put("a", value(2)) is STORED
    assert none.cluster.put("a", value(2), retention=retention) is EXISTS
    assert one.store.get("a") == value(2)
    one.node.entries.publish_changes()
    assert none.cluster.get("a") == value(2)
