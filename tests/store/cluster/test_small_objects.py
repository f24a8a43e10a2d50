"""Objects that take the shortest way: one round trip to one node, without Python there."""

import contextlib
import gc
import itertools
import os
import socket
import sys
import threading

import numpy as np
import pytest
from redis import Redis

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.transfer import RedisPublisher
from mooncake_serving.store import HotKeys, Quota, Store
from mooncake_serving.store.cluster import writes
from mooncake_serving.store.directory import Claim

from ..directory.conftest import patient  # noqa: F401
from ..support import BEING_WRITTEN, EXISTS, STORED, eventually
from .support import SHORT_TTL_S, UNIT, damage, replaced, value


def fails(owner, name: str) -> contextlib.AbstractContextManager:
    """Whoever calls this method meanwhile fails."""

    def refuse(*_, **__):
        raise AssertionError(f"{name} was called")

    return replaced(owner, name, refuse)


def num_calls(function) -> int:
    """How many Python functions it calls."""
    count = 0

    def note(_frame, event, _argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


class TestReads:
    """Of objects whose location is remembered."""

    @pytest.fixture
    def pair(self, hosts):
        one, none = hosts.make("one"), hosts.make("none", 0)
        one.cluster.put_each(range(4), [value(i, 1000 * i) for i in range(4)])
        assert none.cluster.match_prefix(range(4)) == 4
        return one, none

    def test_objects_are_read_directly_from_their_only_holder(self, pair):
        one, none = pair
        arrays = [np.zeros(4000, np.uint8) for _ in range(4)]
        pinned, locations = none.node.reads._pinned, none.node.locations
        with fails(pinned, "read"), fails(locations, "_keep"):
            sizes = none.cluster.get_into_each(range(4), arrays)
            assert none.cluster.get_into(3, arrays[0][:1000], arrays[0][1000:]) == 3000
            assert none.cluster.get(2) == value(2, 2000)
            assert none.cluster.get_each(range(4)) == [value(i, 1000 * i) for i in range(4)]
            assert none.cluster.get_into(3, arrays[1][:500], offset=100) == 3000
        assert bytes(arrays[1][:500]) == value(3, 3000)[100:600]
        arrays[1][:1000] = np.frombuffer(value(1, 1000), np.uint8)
        assert sizes.tolist() == [0, 1000, 2000, 3000]
        for i in range(1, 4):
            assert bytes(arrays[i][: 1000 * i]) == value(i, 1000 * i)
            assert not arrays[i][1000 * i :].any()
        assert bytes(arrays[0][:3000]) == value(3, 3000)
        eventually(lambda: one.store.stats().num_pins == 0)

    def test_single_object_takes_few_calls(self, pair):
        none, array = pair[1], np.zeros(3000, np.uint8)
        assert none.cluster.get_into(3, array) == 3000  # what is made once
        assert num_calls(lambda: none.cluster.get_into(3, array)) <= 50

    def test_unreadable_objects_fall_back_to_the_general_path(self, pair):
        one, none = pair
        damage(one.store, 1)
        one.store.remove(2)
        arrays = [np.zeros(2999, np.uint8) for _ in range(4)]
        assert none.cluster.get(2) is None
        sizes = none.cluster.get_into_each(range(4), arrays)
        assert sizes.tolist() == [0, -4, -1, -2]
        assert not one.store.exists(1), "the damaged copy was dropped"
        assert none.cluster.get_into_each([0], [arrays[0]]).tolist() == [0]

    def test_moved_object_is_found(self, hosts, pair):
        one, none = pair
        two = hosts.make("two")
        two.cluster.fetch([3])
        one.cluster.node.entries.withdraw(one.cluster.keyspace.keys([3]))
        one.store.remove(3)
        array = np.zeros(3000, np.uint8)
        assert none.cluster.get_into(3, array) == 3000
        assert bytes(array) == value(3, 3000)

    def test_closed_holder_is_skipped(self, hosts, pair):
        one, none = pair
        two = hosts.make("two")
        two.cluster.fetch(range(4))
        one.engine.close()
        array = np.zeros(3000, np.uint8)
        assert none.cluster.get_into(3, array) == 3000
        assert bytes(array) == value(3, 3000)

    def test_hot_objects_are_counted(self, hosts):
        one = hosts.make("one")
        two = hosts.make("two", options={"hot": HotKeys(2)})
        one.cluster.put("a", value(1))
        array = np.zeros(UNIT, np.uint8)
        two.cluster.exists("a")
        for _ in range(4):
            assert two.cluster.get_into("a", array) == UNIT
        assert two.store.exists("a")

    def test_closed_store_is_rejected(self, pair):
        _, none = pair
        none.cluster.close()
        with pytest.raises(ValueError, match="node must be open"):
            none.cluster.get_into(1, np.zeros(1000, np.uint8))


class TestPuts:
    """Of a node without a pool, with a directory in Redis."""

    @pytest.fixture
    def hosts(self, hosts_with_redis):
        return hosts_with_redis

    @pytest.fixture
    def pair(self, hosts):
        return hosts.make("one"), hosts.make("none", 0)

    def test_only_the_engine_is_asked(self, pair):
        one, none = pair
        assert none.node.membership.homes[0].publishes
        with fails(none.node.claims, "ask"), fails(one.node._server._handler, "handle"):
            values = [value(i, 100 * i) for i in range(5)]
            assert none.cluster.put_each(range(5), values) == [STORED] * 5
            assert none.cluster.put_from("a", b"two", value(7)) is STORED
        assert one.store.get_each(range(5)) == values and one.store.get("a") == b"two" + value(7)
        assert none.cluster.match_prefix(range(6)) == 5
        assert none.cluster.get("a") == b"two" + value(7)
        none.cluster.remove("a")
        assert not one.store.exists("a") and not none.cluster.exists("a")
        assert none.cluster.put("a", value(8)) is STORED and one.store.get("a") == value(8)

    def test_existing_objects_are_not_replaced(self, hosts, pair):
        one, none = pair
        far = hosts.make("far", 8 * UNIT)
        far.cluster.put("there", value(1))
        one.cluster.put("here", value(2))
        results = none.cluster.put_each(["there", "new", "here", "new"], [value(9)] * 4)
        assert results == [EXISTS, STORED, EXISTS, EXISTS]
        assert not one.store.exists("there") and one.store.get("here") == value(2)
        eventually(lambda: one.store.stats().num_writing == 0)
        with fails(none.node.client, "put"):
            assert none.cluster.put("there", value(9)) is EXISTS

    def test_keys_being_written_by_others_are_left_alone(self, hosts, pair):
        one, none = pair
        two = hosts.make("two", 8 * UNIT)
        words = two.cluster.keyspace.keys(["a"])
        claims = two.node.directory.claim(two.node.name, words, 100.0)
        assert claims.tolist() == [Claim.GRANTED]
        assert none.cluster.put("a", value(1)) is BEING_WRITTEN
        assert not one.store.exists("a")
        eventually(lambda: one.store.stats().num_writing == 0)
        two.node.directory.abandon(two.node.name, words)
        assert none.cluster.put("a", value(1)) is STORED
        with one.cluster.begin("b", UNIT):
            assert none.cluster.put("b", value(1)) is BEING_WRITTEN

    def test_single_object_takes_few_calls(self, pair):
        none, data = pair[1], value(1)
        assert none.cluster.put("a", data) is STORED  # what is made once
        assert num_calls(lambda: none.cluster.put("b", data)) <= 50

    def test_direct_put_into_a_full_pool_evicts(self, hosts):
        one, none = hosts.make("one", 8 * UNIT), hosts.make("none", 0)
        for i in range(20):
            assert none.cluster.put(i, value(i)) is STORED
        assert none.cluster.get(19) == value(19)
        found = none.cluster.exists_each(range(20))
        assert found.tolist() == [one.store.exists(i) for i in range(20)] and found.sum() <= 8

    @pytest.mark.parametrize("retention", ["soft", "hard"])
    def test_retention_is_applied(self, pair, retention):
        one, none = pair
        assert none.cluster.put("a", value(1), retention=retention) is STORED
        kept = one.store.pool.objects().retention.tolist()
        assert kept == [["normal", "soft", "hard"].index(retention)]

    def test_draining_node_rejects_direct_puts(self, hosts, pair):
        one, none = pair
        two = hosts.make("two", 8 * UNIT)
        none.node.members(anew=True)
        one.node.set_draining(True)
        assert none.node.membership.homes[0].name == one.node.name, "it does not know yet"
        assert none.cluster.put("a", value(1)) is STORED
        assert two.store.exists("a") and not one.store.exists("a")

    def test_a_pool_with_quotas_is_put_into_by_its_node(self, hosts):
        one = hosts.make("one", store=Store.create(64 * UNIT, quota=Quota(4 * UNIT)))
        none = hosts.make("none", 0)
        assert not none.node.membership.homes[0].publishes
        for i in range(10):
            assert none.cluster.put(i, value(i)) is STORED
        assert one.store.stats().num_ready <= 4

    def test_direct_puts_resume_after_a_redis_restart(self, hosts, redis):
        one = hosts.make("one", ttl_s=SHORT_TTL_S)
        none = hosts.make("none", 0, ttl_s=SHORT_TTL_S)
        assert none.cluster.put("a", value(1)) is STORED
        redis.stop()
        with pytest.raises(Unavailable, match="redis"):
            none.cluster.put("b", value(2))
        assert not one.store.exists("b") and not one.node._served.publishes
        redis.start()
        eventually(lambda: one.node._served.publishes)
        asked, stored = [], []
        ask = none.node.claims.ask
        keys = itertools.count()

        def is_put_directly() -> bool:
            asked.clear()
            key = next(keys)
            try:
                assert none.cluster.put(key, value(3)) is STORED
            except Unavailable:  # on a busy machine the membership may have run out
                return False
            stored.append(key)
            return not asked

        with replaced(none.node.claims, "ask", lambda _, *args: asked.append(args) or ask(*args)):
            eventually(is_put_directly)
        eventually(lambda: none.cluster.exists_each(["a", *stored]).all())

    def test_object_being_written_stays_listed(self, pair):
        """Though the pool does not have it yet, whatever its node looks for."""
        one, none = pair
        words = one.cluster.keyspace.keys(["a"])
        put = one.store.begin("a", UNIT)
        assert one.node._served.publisher.publish(words).all()
        assert one.node.entries.withdraw_gone(words).tolist() == [False]
        one.node.entries.withdraw(words)  # of the one that was there before
        one.node.entries.publish_all()
        assert one.cluster.put("a", value(2)) is BEING_WRITTEN
        assert none.cluster.exists("a") and none.cluster.get("a") is None
        put.view[:] = value(1)
        put.commit()
        assert none.cluster.get("a") == value(1) == one.store.get("a")

    def test_a_claim_ends_a_put_without_claims(self, hosts, pair):
        """Of two nodes of a pool one is draining: what it puts goes elsewhere."""
        one, none = pair
        twin = hosts.make("one", store=Store.open(one.store.pool.path))
        other = hosts.make("other")
        assert twin.node.pool_name == one.node.pool_name
        twin.node.set_draining(True)
        none.node.members(anew=True)
        given, put = [], twin.cluster._writes._offer

        def give(_, *args):
            given.append(none.cluster.put("a", value(1)))
            return put(*args)

        with replaced(twin.cluster._writes, "_offer", give):
            assert twin.cluster.put("a", value(2)) is STORED
        assert given == [BEING_WRITTEN]
        assert other.store.get("a") == value(2) and not one.store.exists("a")

    def test_a_claimant_waits_for_the_put_that_it_ends(self, hosts, pair, monkeypatch):
        """Both would lose otherwise."""
        one, none = pair
        put = one.store.begin("a", UNIT)  # as an engine does
        timer = threading.Timer(0.02, put.abort)
        monkeypatch.setattr(writes, "DIRECT_S", 60.0)
        timer.start()
        assert one.cluster.put("a", value(1)) is STORED
        put = one.store.begin("b", 10)
        timer = threading.Timer(0.02, put.abort)
        timer.start()
        with one.cluster.begin("b", 10) as begun:
            begun.view[:] = b"0123456789"
        assert one.store.get("b") == b"0123456789"
        put = one.store.begin("c", UNIT)
        timer = threading.Timer(0.02, put.abort)
        monkeypatch.setattr(none.cluster._writes, "_put_at", lambda *_: None)
        timer.start()
        assert none.cluster.put("c", value(3)) is STORED

    def test_lost_reply_of_redis_leaves_the_object_unstored(self, pair):
        """The engine cannot know whether the object is listed, so it does not store it."""
        one, none = pair
        ours, theirs = socket.socketpair()

        def list_and_leave() -> None:
            packed = theirs.recv(1 << 16).split(b"\r\n", 3)[-1][:-2]
            keys = np.frombuffer(packed, np.uint64).reshape(-1, 2)
            one.node.directory.publish(one.node.pool_name, keys)
            theirs.shutdown(socket.SHUT_RDWR)

        thread = threading.Thread(target=list_and_leave)
        thread.start()
        fake = RedisPublisher(os.dup(ours.fileno()), b"", 60.0, 0)
        one.node._served._served.let_publish(fake)
        assert none.cluster.put("a", value(1)) is STORED
        thread.join()
        ours.close()
        theirs.close()
        assert fake.reason and one.store.get("a") == value(1) == none.cluster.get("a")

    def test_object_removed_while_being_written_is_not_relisted(self, pair):
        """By the node, which cannot know whether it is a copy of what was removed."""
        one, none = pair
        words = one.cluster.keyspace.keys(["a"])
        with one.store.begin("a", UNIT):
            one.node.directory.remove(words, 100.0)
            one.node.entries.withdraw(words)
            assert not none.cluster.exists("a")

    def test_entries_without_an_object_are_withdrawn(self, hosts, monkeypatch):
        one = hosts.make("one", ttl_s=SHORT_TTL_S)
        none = hosts.make("none", 0, ttl_s=SHORT_TTL_S)
        assert one.node._served.publisher.publish(one.cluster.keyspace.keys(["lost"])).all()
        served = one.node._served._served
        take = served.take
        is_noted = threading.Event()

        def take_once():
            done = take()
            if not is_noted.is_set():
                is_noted.set()
                done = done._replace(is_listed_in_vain=True)
            return done

        monkeypatch.setattr(served, "take", take_once)
        eventually(lambda: not none.cluster.exists("lost"))

    def test_unfinished_writes_are_looked_at_again(self, pair):
        """An object that went without a word, and was being put again when its node looked."""
        one, none = pair
        one.cluster.put("a", value(1))
        one.store.pool.remove(tuple(one.cluster.keyspace.keys(["a"])[0].tolist()))
        put = one.store.begin("a", UNIT)
        one.node.entries.publish_changes()
        assert none.cluster.exists("a")
        put.abort()
        one.node.entries.publish_changes()
        assert not none.cluster.exists("a")

    def test_rejoined_node_gets_a_new_publisher(self, hosts, redis):
        """The directory may be another server by now."""
        one = hosts.make("one", ttl_s=SHORT_TTL_S)
        before = one.node._served.publisher
        with Redis(port=redis.port) as client:
            client.flushall()
        eventually(lambda: one.node._served.publisher is not before)
        assert before.reason == "", "it was replaced though it works"

    def test_publisher_reconnects_after_losing_an_idle_connection(self, hosts, redis):
        one = hosts.make("one", ttl_s=SHORT_TTL_S)
        before = one.node._served.publisher
        with Redis(port=redis.port) as client:
            client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            with fails(one.node.entries, "publish_all"):
                eventually(lambda: one.node._served.publisher is not before)
        assert before.reason and one.node._served.publishes

    def test_closed_node_leaves_no_redis_connections(self, hosts, redis):
        with Redis(port=redis.port) as client:
            host = hosts.make("one")
            gc.disable()  # nothing is left to it
            try:
                host.close()
                assert host.node._served.publisher is None
                hosts.all.remove(host)
                names = {entry["cmd"] for entry in client.client_list()}
                eventually(
                    lambda: (
                        "script|load" not in {e["cmd"] for e in client.client_list()}
                        and "time" not in {e["cmd"] for e in client.client_list()}
                    ),
                    names,
                )
            finally:
                gc.enable()
