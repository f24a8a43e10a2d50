"""Nodes stay members while they publish all their objects, however long that takes."""

import threading

import pytest

from mooncake_kernels.errors import Unavailable
from mooncake_serving.store.cluster.messages import PINNED
from mooncake_serving.store.directory import EmbeddedDirectory

from ..support import STORED, eventually
from .support import SHORT_TTL_S, UNIT, SomeDirectory, replaced, value


def test_membership_is_renewed_while_publishing_all_objects(hosts):
    """As of millions, after the directory has lost them."""
    one = hosts.make("one", ttl_s=SHORT_TTL_S)
    renewals = []
    goes_on = threading.Event()

    def publish_slowly(publish, *args, **options):
        eventually(goes_on.is_set)
        return publish(*args, **options)

    def renew(original, *args):
        renewals.append(original(*args))
        return renewals[-1]

    one.cluster.put("a", value(1))
    with replaced(hosts.directory, "renew", renew):
        with replaced(hosts.directory, "publish", publish_slowly):
            hosts.directory.leave(one.node.name)
            eventually(lambda: len(renewals) > 6)  # twice as long as it lasts
            assert [member.name for member in hosts.directory.members()] == [one.node.name]
            assert renewals.count(False) == 1
            goes_on.set()
            eventually(lambda: one.cluster.exists("a") and not one.node.entries.is_stale)
    keys = one.cluster.keyspace.keys(["a"])
    eventually(lambda: hosts.directory.holders(keys) == [(one.node.pool_name,)])


def test_membership_is_renewed_while_the_pool_is_locked(hosts):
    """As the pool's mutex is then held, its numbers are late, and in the end a ``TimeoutError``."""
    one = hosts.make("one", ttl_s=SHORT_TTL_S)
    free_bytes = one.store.stats().free_bytes
    renewals, asked = [], []
    goes_on = threading.Event()

    def held(stats):
        asked.append(stats)
        if len(asked) == 1:
            eventually(goes_on.is_set)
        if len(asked) < 4:
            raise TimeoutError("a process that does not continue has the pool")
        return stats()

    def renew(original, member, ttl_s):
        renewals.append(original(member, ttl_s))
        return renewals[-1]

    with replaced(hosts.directory, "renew", renew), replaced(one.store, "stats", held):
        eventually(lambda: asked)
        already = len(renewals)
        eventually(lambda: len(renewals) > already + 6)  # twice as long as it lasts
        [member] = hosts.directory.members()
        assert (member.name, member.free_bytes) == (one.node.name, free_bytes)
        goes_on.set()
        one.store.put("a", value(1))
        eventually(lambda: hosts.directory.members()[0].free_bytes == free_bytes - UNIT)
    assert all(renewals)


def test_updates_after_the_membership_expired_are_repeated(hosts):
    one = hosts.make("one", ttl_s=SHORT_TTL_S)
    hosts.directory.leave(one.node.name)
    one.store.put("a", value(1))
    keys = one.cluster.keyspace.keys(["a"])
    one.node.entries.publish(keys)
    assert one.node.entries.is_stale
    eventually(lambda: hosts.directory.holders(keys) == [(one.node.pool_name,)])


def test_node_that_cannot_list_its_objects_does_not_join(hosts):
    directory = EmbeddedDirectory()
    one = hosts.make("one")
    one.store.put("a", value(1))
    before = set(threading.enumerate())
    with pytest.raises(RuntimeError, match="the pool is damaged"):
        hosts.make("two", directory=Untold(directory), store=one.store)
    assert directory.members() == [] and eventually(lambda: set(threading.enumerate()) <= before)


def test_reads_no_one_ends_expire_while_the_directory_is_away(hosts):
    directory = SomeDirectory(EmbeddedDirectory())
    one = hosts.make("one", directory=directory, ttl_s=SHORT_TTL_S)
    one.store.put("a", value(1))
    directory.is_away = True
    keys = one.cluster.keyspace.keys(["a"])
    found = one.node._pins.pin(("a reader", 1, 7), keys, verify=False, keep_s=0.01)
    assert found["status"].tolist() == [PINNED] and one.store.remove("a")
    eventually(lambda: one.node.num_readers() == 0)
    assert one.store.stats().num_doomed == 0
    directory.is_away = False


def test_put_rejoins_at_once_after_the_membership_expired(hosts):
    one, none, two = hosts.make("one"), hosts.make("none", 0), hosts.make("two")
    one.cluster.put("before", value(1))
    put = one.cluster.begin("begun", UNIT)
    for host in (one, none):
        hosts.directory.leave(host.node.name)  # as if it had been forgotten
    assert one.cluster.put("a", value(2)) is STORED and none.cluster.put("b", value(3)) is STORED
    assert two.cluster.get_each(["a", "b"]) == [value(2), value(3)]
    assert len(hosts.directory.members()) == 3
    eventually(lambda: two.cluster.get("before") == value(1))
    hosts.directory.leave(one.node.name)
    put.claimed_s -= 60
    assert put.commit() is STORED and two.cluster.exists("begun")


def test_leaving_node_does_not_rejoin_for_a_put(hosts):
    one = hosts.make("one")

    def leave_before(claim, *args):
        one.node.membership.close()
        return claim(*args)

    with replaced(hosts.directory, "claim", leave_before):
        with pytest.raises(Unavailable, match="knows no living member"):
            one.cluster.put("a", value(1))
    assert hosts.directory.members() == []


class Untold(SomeDirectory):
    def publish(self, *_, **__):
        raise RuntimeError("the pool is damaged")
