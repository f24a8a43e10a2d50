"""Puts into the own pool that take one round trip to Redis: copied, listed, then visible."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.metadata import bounded_socket
from mooncake_kernels.pool import PutResult
from mooncake_serving.store import Quota, Store
from mooncake_serving.store.cluster import writes
from mooncake_serving.store.directory import Claim

from ...threads import in_threads
from ..directory.conftest import patient  # noqa: F401
from ..support import BEING_WRITTEN, EXISTS, STORED, WAIT_S, eventually
from .support import UNIT, kept_by, replaced, value


@pytest.fixture
def hosts(hosts_with_redis):
    return hosts_with_redis


@pytest.fixture
def pair(hosts):
    return hosts.several(2)


class Begun:
    """What is begun in a pool, whose commit does something else first."""

    def __init__(self, puts, do):
        self._puts = puts
        self._do = do

    def __getattr__(self, name):
        return getattr(self._puts, name)

    def __enter__(self):
        return self._puts.__enter__()

    def __exit__(self, *error):
        self._puts.__exit__(*error)

    def commit(self, indices):
        self._do()
        self._puts.commit(indices)


def before_commit(host, do):
    """Do something whenever what the host puts is listed, and about to be stored."""
    return replaced(host.store, "begin_keys", lambda begin, *args: Begun(begin(*args), do))


class Asked:
    """Counts the claims that a host asks for."""

    def __init__(self, host):
        self.num_keys = 0
        self._replaced = replaced(host.node.claims, "ask", self._ask)

    def _ask(self, ask, keys, *args):
        self.num_keys += len(keys)
        return ask(keys, *args)

    def __enter__(self):
        self._replaced.__enter__()
        return self

    def __exit__(self, *error):
        self._replaced.__exit__(*error)


def test_object_that_exists_and_is_not_stored_yet_is_waited_for(pair):
    one, two = pair
    listed, missed = threading.Event(), threading.Event()

    def hold():
        listed.set()
        assert missed.wait(WAIT_S)

    def note_missed(tell, *args):
        tell(*args)
        missed.set()

    with ThreadPoolExecutor(1) as executor, before_commit(one, hold):
        with replaced(two.node.client, "tell_missed", note_missed):
            put = executor.submit(one.cluster.put, "a", value(1))
            assert listed.wait(WAIT_S)
            assert two.cluster.exists("a")
            assert two.cluster.get("a") == value(1)
            assert put.result() is STORED


def test_object_that_is_listed_and_never_stored_is_absent(pair):
    one, two = pair
    one.node.entries._directory.publish(one.node.pool_name, one.store.keyspace.keys(["a"]))
    assert two.cluster.exists("a")
    assert two.cluster.get("a") is None
    eventually(lambda: not two.cluster.exists("a"))


def test_listed_puts_take_no_claims(pair):
    one, two = pair
    values = [value(i, 100 * i) for i in range(5)]
    with Asked(one) as asked:
        assert one.cluster.put_each(range(5), values) == [STORED] * 5
        assert one.cluster.put_from("a", b"two", value(7)) is STORED
        assert one.cluster.put("a", value(8)) is EXISTS
        assert asked.num_keys == 0
    assert one.store.get_each(range(5)) == values
    assert two.cluster.match_prefix(range(6)) == 5
    assert two.cluster.get("a") == b"two" + value(7)
    assert two.cluster.remove("a")
    assert one.cluster.put("a", value(8)) is STORED and two.cluster.get("a") == value(8)


def test_object_removed_between_listing_and_storing_stays_removed(pair):
    one, two = pair
    with before_commit(one, lambda: two.cluster.remove(9)):
        assert one.cluster.put(9, value(9)) is STORED
    assert not two.cluster.exists(9) and one.store.exists(9)
    one.node.entries.publish_changes()
    one.node.entries.publish_all()
    assert not two.cluster.exists(9) and not one.store.exists(9)
    assert one.cluster.put(9, value(8)) is STORED and two.cluster.get(9) == value(8)


def test_removal_that_does_not_reach_the_pool_is_completed(pair):
    """As when the remover dies: the object is found nowhere else again."""
    one, two = pair
    one.cluster.put("a", value(1))
    two.node.entries.remove(two.cluster.keyspace.keys(["a"]))
    one.node.entries.publish_changes()
    assert not two.cluster.exists("a")
    one.node.entries.publish_all()
    assert not two.cluster.exists("a") and not one.store.exists("a")


def test_eviction_by_a_process_without_a_node_is_withdrawn(pair):
    one, two = pair
    one.cluster.put("a", value(1))
    one.store.pool.evict(UNIT)
    one.node.entries.publish_changes()
    assert not two.cluster.exists("a")


@pytest.mark.parametrize("look", ["publish_changes", "publish_all"])
def test_object_put_again_after_removal_is_not_withdrawn(hosts, look):
    """The put is listed, and stored, before the look tells the directory what was gone."""
    node, client = hosts.make("node"), hosts.make("client", 0)
    entries = node.node.entries
    assert client.cluster.put("a", value(1)) is STORED
    entries.publish_changes()
    assert client.cluster.remove("a")
    found = []

    def put_and_withdraw(withdraw, *args):
        client.cluster.put("a", value(1))
        withdraw(*args)
        found.append(client.cluster.get("a"))

    with replaced(hosts.directory, "withdraw", put_and_withdraw):
        getattr(entries, look)()
    client.cluster.put("a", value(1))
    entries.publish_changes()
    assert client.cluster.get("a") == value(1) and None not in found


def test_objects_of_other_holders_and_writers_are_left_alone(pair):
    one, two = pair
    two.cluster.put("there", value(1))
    words = two.cluster.keyspace.keys(["claimed"])
    claims = two.node.directory.claim(two.node.name, words, 100.0)
    assert claims.tolist() == [Claim.GRANTED]
    keys = ["there", "new", "claimed", "new"]
    assert one.cluster.put_each(keys, [value(9)] * 4) == [EXISTS, STORED, BEING_WRITTEN, EXISTS]
    assert one.store.exists_each(keys).tolist() == [False, True, False, True]
    assert one.store.stats().num_writing == 0
    two.node.directory.abandon(two.node.name, words)
    assert one.cluster.put("claimed", value(9)) is STORED


def test_object_known_to_be_elsewhere_is_not_written(pair):
    one, two = pair
    two.cluster.put("there", value(1))
    assert one.cluster.exists("there")
    with replaced(one.store, "begin_keys", lambda *_: pytest.fail("it was begun")):
        assert one.cluster.put("there", value(9)) is EXISTS


@pytest.mark.parametrize("is_here", [True, False])
def test_large_objects_are_claimed_first(hosts, monkeypatch, is_here):
    monkeypatch.setattr(writes, "MAX_PUT_BYTES", UNIT)
    one = hosts.make("one")
    writer = one if is_here else hosts.make("none", 0)
    with Asked(writer) as asked:
        assert writer.cluster.put("a", value(1, UNIT)) is STORED and asked.num_keys == 0
        assert writer.cluster.put("b", value(1, UNIT + 1)) is STORED and asked.num_keys == 1
    assert one.store.exists("b")


def test_retention_of_listed_puts(pair):
    one, _ = pair
    one.cluster.put_from_each(
        range(3), [(value(i),) for i in range(3)], retention="soft", position=5
    )
    assert kept_by(one.store, range(3)) == [(1, 5), (1, 6), (1, 7)]


def test_listed_put_into_a_full_pool_evicts(hosts):
    one, none = hosts.make("one", 8 * UNIT), hosts.make("none", 0)
    for i in range(20):
        assert one.cluster.put(i, value(i)) is STORED
    assert one.cluster.put_each(range(30, 42), [value(i) for i in range(30, 42)]) == [STORED] * 12
    everything = [*range(20), *range(30, 42)]
    found = none.cluster.exists_each(everything)
    assert found.tolist() == one.store.exists_each(everything).tolist() and found.sum() == 8


def test_existing_objects_cause_no_eviction(hosts):
    one, two = hosts.make("one", 8 * UNIT), hosts.make("two")
    one.cluster.put_each(range(6), [value(i) for i in range(6)])
    two.cluster.put_each(range(10, 14), [value(i) for i in range(4)])
    assert one.cluster.put_each(range(10, 14), [value(i) for i in range(4)]) == [EXISTS] * 4
    assert one.store.exists_each(range(6)).all() and one.store.stats().num_writing == 0


def test_the_tail_of_a_batch_is_evicted_first(pair):
    """Also if some of it was stored under claims."""
    one, two = pair
    words = two.cluster.keyspace.keys([2])
    two.node.directory.claim(two.node.name, words, 100.0)

    def ask_later(ask, *args):
        two.node.directory.abandon(two.node.name, words)
        return ask(*args)

    with replaced(one.node.claims, "ask", ask_later):
        assert one.cluster.put_each(range(5), [value(i) for i in range(5)]) == [STORED] * 5
    for num_left in (4, 3, 2, 1):
        one.store.evict(1)
        assert one.store.match_prefix(range(5)) == num_left == one.store.stats().num_ready


def test_watermark_counts_listed_puts(hosts, monkeypatch):
    one = hosts.make("one", store=Store.create(64 * UNIT, watermark=(0.9, 0.8)))
    added = []
    monkeypatch.setattr(one.store._watermark, "added", added.append)
    one.cluster.put_each(range(3), [value(i, 100 + i) for i in range(3)])
    assert added == [100, 101, 102]


def test_pool_with_quotas_uses_claims(hosts):
    one = hosts.make("one", store=Store.create(64 * UNIT, quota=Quota(4 * UNIT)))
    with Asked(one) as asked:
        assert one.cluster.put(1, value(1)) is STORED and asked.num_keys == 1


def test_draining_node_gives_puts_to_others(pair):
    one, two = pair
    one.node.set_draining(True)
    assert one.cluster.put("a", value(1)) is STORED
    assert two.store.exists("a") and not one.store.exists("a")


def test_broken_publisher_falls_back_to_claims(pair):
    """It is not known whether it has listed the objects: they are claimed, and what it has listed
    to no effect is withdrawn.
    """
    one, two = pair
    publisher = one.node._served.publisher

    class Broken:
        reason = ""
        is_late = False

        def publish(self, keys):
            assert publisher.publish(keys).all()

    one.node._served.publisher = Broken()
    with Asked(one) as asked:
        assert one.cluster.put("a", value(1)) is STORED and asked.num_keys == 1
    assert one.node.entries.is_stale and two.cluster.get("a") == value(1)


@pytest.mark.parametrize("is_here", [True, False])
def test_unresponsive_server_is_waited_for_once(redis, hosts, monkeypatch, is_here):
    monkeypatch.setattr(bounded_socket, "TIMEOUT_S", 0.4)  # of the engine
    one = hosts.make("one")
    monkeypatch.setattr(bounded_socket, "TIMEOUT_S", 60)
    writer = one if is_here else hosts.make("none", 0)
    with Asked(writer) as asked:
        redis.freeze()
        try:
            with pytest.raises(Unavailable, match="put: the directory does not answer in time"):
                writer.cluster.put("a", value(1))
        finally:
            redis.thaw()
        assert asked.num_keys == 0
    assert writer.cluster.put("a", value(1)) is STORED and one.cluster.get("a") == value(1)


def test_put_that_fails_after_listing_is_withdrawn(pair):
    one, two = pair

    def fail():
        raise TimeoutError("stopped")

    with before_commit(one, fail), pytest.raises(TimeoutError, match="stopped"):
        one.cluster.put("a", value(1))
    assert one.store.stats().num_writing == 0 and one.node.entries.is_stale
    one.node.entries.publish_all()
    assert not two.cluster.exists("a")


def test_one_of_many_threads_on_all_hosts_wins(hosts):
    """By whichever way: listed, directly into either pool, or under a claim."""
    one, two = hosts.make("one"), hosts.make("two")
    clients = [hosts.make(f"client {i}", 0) for i in range(3)]
    for client, home in zip(clients, (one, two, one), strict=True):
        members = client.node.membership
        members.homes = tuple(
            sorted(members.homes, key=lambda member, name=home.node.name: member.name != name)
        )

    def claim_and_write(cluster, key, data) -> PutResult:
        begun = cluster.begin(key, len(data))
        if isinstance(begun, PutResult):
            return begun
        begun.view[:] = data
        return begun.commit()

    ways = [host.cluster.put for host in (one, one, two, *clients)]
    ways += [partial(claim_and_write, host.cluster) for host in (one, two)]
    start = threading.Barrier(len(ways))

    def run(way: Callable, data: bytes) -> list[PutResult]:
        return [start.wait(60) >= 0 and way(i, data) for i in range(40)]

    values = [value(which, 500) for which in range(len(ways))]
    results = in_threads(*(partial(run, *each) for each in zip(ways, values, strict=True)))
    for i, result in enumerate(zip(*results, strict=True)):
        [won] = [
            data for data, one_result in zip(values, result, strict=True) if one_result is STORED
        ]
        assert [host.store.get(i) for host in (one, two) if host.store.exists(i)] == [won], result
        eventually(lambda i=i, won=won: clients[0].cluster.get(i) == won)
    assert not np.any([host.store.stats().num_writing for host in (one, two)])
