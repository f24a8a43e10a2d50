"""Objects of other hosts by key: a holder's engine answers, without its node."""

import contextlib
import ctypes
from types import SimpleNamespace

import numpy as np
import pytest

from mooncake_kernels.errors import FailureKind, TransferError, Unavailable
from mooncake_kernels.pool import ObjectPool, PoolCounts, PutResult
from mooncake_serving.store import Quota, SsdTier, Store, TieredStore
from mooncake_serving.store.cluster import reads
from mooncake_serving.store.cluster.directory_entries import Locations

from ..support import STORED, eventually
from .support import SHORT_TTL_S, UNIT, SomeDirectory, damage, replaced, value


def is_asked(host) -> contextlib.AbstractContextManager:
    """Whoever asks the host's node instead of its engine fails."""

    def refused(*args, **options):
        raise AssertionError("the node was asked")

    return replaced(host.node._server._handler, "handle", refused)


def received(monkeypatch, then) -> None:
    """Have something happen when an answer has arrived, before it is looked at."""
    read = reads.read_checked

    def read_and(*args):
        answer = read(*args)

        def receive(places, *options):
            return then(places, answer.receive(places, *options))

        return SimpleNamespace(
            statuses=answer.statuses,
            object_bytes=answer.object_bytes,
            receive=receive,
            close=answer.close,
        )

    monkeypatch.setattr(reads, "read_checked", read_and)


def test_reads_puts_and_removals_bypass_the_node(hosts):
    one, none = hosts.make("one"), hosts.make("none", 0)
    with is_asked(one):
        assert (
            none.cluster.put_each(range(5), [value(i, 100 * i) for i in range(5)]) == [STORED] * 5
        )
        assert none.cluster.put_from("a", b"two", value(7)) is STORED
        assert none.cluster.get_each(range(6)) == [*(value(i, 100 * i) for i in range(5)), None]
        assert none.cluster.get("a") == b"two" + value(7)
        into = np.zeros(50, np.uint8)
        assert none.cluster.get_into(3, into, offset=10) == 300
        assert bytes(into) == value(3, 300)[10:60]
        assert none.cluster.remove_each([0, 1, 9]).tolist() == [True, True, False]
    assert one.store.get_each(range(3)) == [None, None, value(2, 200)]
    assert one.cluster.exists_each(range(5)).tolist() == [False, False, True, True, True]
    eventually(lambda: one.store.stats().num_pins == one.store.stats().num_writing == 0)


@pytest.mark.parametrize("by_key", [True, False])
def test_tail_of_a_prompt_is_evicted_first(hosts, by_key):
    """In the holder's pool, whoever has put it, or read it."""
    holder, other = hosts.make("holder", by_key=by_key), hosts.make("other", 0, by_key=by_key)
    values = [b"1"] * 6
    assert other.cluster.put_each(range(6), values) == [STORED] * 6
    assert holder.cluster.put_each(range(6, 9), values[:3]) == [STORED] * 3
    assert holder.store.evict(2 * UNIT).keys[:, 0].tolist() == [5, 4]
    assert other.cluster.get_each(range(3)) == values[:3]
    eventually(lambda: holder.store.stats().num_pins == 0)
    gone = holder.store.evict(6 * UNIT).keys[:, 0].tolist()
    assert gone == [3, 8, 7, 6, 2, 1]


def test_fetched_prompt_is_evicted_from_its_tail(hosts):
    one, two = hosts.make("one"), hosts.make("two")
    one.cluster.put_each(range(4), [b"1"] * 4)
    assert two.cluster.fetch(range(4)) == [STORED] * 4
    assert two.store.evict(3 * UNIT).keys[:, 0].tolist() == [3, 2, 1]


def test_prompt_put_in_several_calls_is_evicted_from_its_tail(hosts):
    one, none = hosts.make("one"), hosts.make("none", 0)
    for first in (0, 3):
        one.cluster.put_each(range(first, first + 3), [b"1"] * 3)
    one.cluster.order_prompt(range(6))
    assert one.store.evict(4 * UNIT).keys[:, 0].tolist() == [5, 4, 3, 2]
    none.cluster.order_prompt(range(6))  # it has no pool


def test_checksum_mismatch_is_read_again(hosts, monkeypatch):
    one, two = hosts.several(2)
    one.cluster.put_each(range(3), [value(i) for i in range(3)])
    num_answers = 0

    def spoil(places, is_right):
        nonlocal num_answers
        num_answers += 1
        ctypes.memset(places[1][0][0], 0, UNIT)
        return is_right & np.array([True, False, True])

    received(monkeypatch, spoil)
    assert two.cluster.fetch(range(3)) == [STORED] * 3 and num_answers == 1
    assert two.store.get_each(range(3)) == [value(i) for i in range(3)]
    assert two.store.stats().num_writing == 0


@pytest.mark.parametrize("offset", [None, 100])
def test_object_damaged_at_its_holder_is_dropped_there(hosts, offset):
    one, two = hosts.several(2)
    one.cluster.put_each(["a", "b"], [value(1), value(2)])
    damage(one.store, "a")
    into = np.zeros(UNIT - 100, np.uint8)
    buffers = [into] if offset else [np.zeros(UNIT, np.uint8)]
    with pytest.raises(Exception, match="damaged wherever it is"):
        two.cluster.get_into("a", *buffers, offset=offset)
    assert not one.store.exists("a") and not two.cluster.exists("a")
    assert two.cluster.get("b") == value(2)


def test_holder_lost_mid_read_is_skipped(hosts, monkeypatch):
    one, two, three = hosts.make("near"), hosts.make("far"), hosts.make("near")
    one.cluster.put("a", value(1, 10 * UNIT))
    two.cluster.fetch(["a"])
    failed = []

    def fail_once(places, is_right):
        if not failed:
            failed.append(places)
            raise TransferError(one.node.name, "connection closed by peer")
        return is_right

    received(monkeypatch, fail_once)
    assert three.cluster.fetch(["a"]) == [STORED] and failed
    assert three.store.get("a") == value(1, 10 * UNIT) and three.store.stats().num_writing == 0


def test_node_evicts_for_puts_into_its_full_pool(hosts):
    one, none = hosts.make("one", 8 * UNIT), hosts.make("none", 0)
    for i in range(20):
        assert none.cluster.put(i, value(i)) is STORED
        assert none.cluster.get(i) == value(i)
    listed = none.cluster.exists_each(range(20))
    assert (
        listed.sum() == 8
        and (listed == one.store.has_keys(one.store.keyspace.keys(range(20)))).all()
    )


def test_object_larger_than_a_response_is_read_by_address(hosts):
    one, two = hosts.make("one", 70 << 20), hosts.make("two")
    large = bytes(65 << 20)
    assert one.cluster.put_each(["large", "small"], [large, value(1)]) == [STORED] * 2
    into = [np.ones(65 << 20, np.uint8), np.zeros(UNIT, np.uint8)]
    assert two.cluster.get_into_each(["large", "small"], into).tolist() == [65 << 20, UNIT]
    assert not into[0].any() and bytes(into[1]) == value(1)


def test_quotas_are_checked_by_the_node(hosts):
    store = Store.create(64 * UNIT, quota=Quota(num_objects=2))
    one, none = hosts.make("one", store=store), hosts.make("none", 0)
    for i in range(3):
        assert none.cluster.put(i, value(i)) is STORED
    assert one.store.stats().num_ready == 2  # what was used longest ago went
    assert none.cluster.get(2) == value(2) and none.cluster.remove(2)
    assert one.store.stats().num_ready == 1
    three = [value(i) for i in range(3)]  # of which two are being written, when the third comes
    assert none.cluster.put_each([5, 6, 7], three) == [STORED, STORED, PutResult.OVER_QUOTA]


def test_objects_on_a_disk_are_requested_from_the_node(hosts, tmp_path):
    tier = SsdTier(tmp_path / "tier", 512 << 20)
    store = TieredStore(ObjectPool.create(8 * UNIT), tier, min_uses=1)
    one, two = hosts.make("one", store=store), hosts.make("two")
    for i in range(20):
        assert one.cluster.put(i, value(i)) is STORED
    store.flush()
    assert two.cluster.get_each(range(20)) == [value(i) for i in range(20)]
    assert two.cluster.remove_each(range(20)).all()
    assert one.cluster.get_each(range(20)) == [None] * 20


def test_object_damaged_in_the_pool_is_read_from_disk(hosts, tmp_path):
    tier = SsdTier(tmp_path / "tier", 512 << 20)
    store = TieredStore(ObjectPool.create(8 * UNIT), tier, min_uses=1)
    one, two = hosts.make("one", store=store), hosts.make("two")
    one.cluster.put_each(range(4), [value(i) for i in range(4)])
    store.evict(8 * UNIT)
    store.flush()
    assert one.cluster.get_each(range(4)) == [value(i) for i in range(4)]
    for i in range(4):
        damage(store, i)
    assert two.cluster.get_each(range(4)) == [value(i) for i in range(4)]
    assert one.cluster.get_each(range(4)) == [value(i) for i in range(4)]
    assert two.cluster.exists_each(range(4)).all()


def test_remote_reads_count_as_uses(hosts, tmp_path, monkeypatch):
    monkeypatch.setattr(SsdTier, "room_bytes", 0)  # the disk is full
    tier = SsdTier(tmp_path / "tier", 512 << 20)
    store = TieredStore(ObjectPool.create(8 * UNIT), tier, min_uses=2)
    one, two = hosts.make("one", store=store), hosts.make("two")
    one.cluster.put_each(range(4), [value(i) for i in range(4)])
    with is_asked(one):
        for _ in range(2):
            assert two.cluster.get(2) == value(2)
    uses = store._uses
    eventually(lambda: uses.estimate(store.keyspace.keys([2]))[0] >= 2)
    store.evict(8 * UNIT)
    store.flush()
    assert one.cluster.exists_each(range(4)).tolist() == [False, False, True, False]


def test_pool_watch_and_counts_see_remote_operations(hosts):
    pool = ObjectPool.create(64 * UNIT)
    one, none = hosts.make("one", store=Store(pool)), hosts.make("none", 0)
    watch = pool.watch()
    watch.look()
    keys = one.store.keyspace.keys([1, 2]).tolist()
    none.cluster.put_each([1, 2], [value(1), value(2)])
    none.cluster.get_each([1, 2])
    assert sorted(watch.look().stored.tolist()) == sorted(keys)
    none.cluster.remove(1)
    assert watch.look().removed.tolist() == keys[:1]
    assert pool.counts() == PoolCounts(2, 0, 2, 1, 0, 2 * UNIT, 2 * UNIT)


def test_object_of_writer_killed_before_publishing_is_found(hosts):
    hosts.make("one", ttl_s=SHORT_TTL_S)
    none = hosts.make("none", 0)
    with replaced(none.node.entries, "publish_for", lambda *_: True):
        assert none.cluster.put("a", value(1)) is STORED
    # Its pool's node has looked.
    eventually(lambda: none.cluster.exists("a") and none.cluster.get("a") == value(1))


def test_partially_removed_object_is_still_found(hosts):
    one, two, three = hosts.several(3)
    one.cluster.put_each(["a", "b"], [value(1), value(2)])
    two.cluster.put("c", value(3))

    def away(remove, member, keys):
        if member == one.node.name:
            raise TransferError(member, "connection refused")
        return remove(member, keys)

    with replaced(three.node.client, "remove", away):
        with pytest.raises(Unavailable, match="remove: it is not removed everywhere: .*refused"):
            three.cluster.remove_each(["a", "c", "b"])
    assert three.cluster.exists_each(["a", "b", "c"]).tolist() == [True, True, False]
    assert three.cluster.get("a") == value(1) and three.cluster.get("c") is None
    assert three.cluster.remove_each(["a", "b", "c"]).tolist() == [True, True, False]


def test_removal_without_the_directory_takes_effect_later(hosts):
    away = SomeDirectory(hosts.directory)
    one, two = hosts.make("one", directory=away, ttl_s=SHORT_TTL_S), hosts.make("two")
    one.cluster.put("a", value(1))
    away.is_away = True
    with pytest.raises(Unavailable, match="the directory is away"):
        one.cluster.remove("a")
    assert not one.store.exists("a")
    away.is_away = False
    eventually(lambda: not two.cluster.exists("a"))


@pytest.mark.parametrize("num_bytes, is_by_key", [(UNIT, True), (1 << 20, False)])
def test_large_objects_on_one_host_are_read_by_address(hosts, num_bytes, is_by_key, monkeypatch):
    read = reads.read_into_checked
    monkeypatch.setattr(reads, "read_into_checked", lambda *args: asked.append(args) or read(*args))
    one = hosts.make("one", 4 << 20, transports=["shm"])
    two = hosts.make("two", transports=["shm"])
    asked = []
    one.cluster.put("a", value(1, num_bytes))
    into = np.zeros(num_bytes, np.uint8)
    assert two.cluster.get_into("a", into) == num_bytes and bytes(into) == value(1, num_bytes)
    assert bool(asked) == is_by_key


@pytest.mark.parametrize("look", ["exists_each", "match_prefix"])
def test_object_locations_are_cached(hosts, look):
    directory = SomeDirectory(hosts.directory)
    one, two = hosts.several(2)
    three = hosts.make("three", directory=directory)
    one.cluster.put_each(range(4), [value(i) for i in range(4)])
    assert np.sum(getattr(three.cluster, look)(range(4))) == 4
    directory.is_away = True
    assert three.cluster.get_each(range(3)) == [value(i) for i in range(3)]
    directory.is_away = False
    # What is not where it was is looked for where it is now.
    two.cluster.fetch([0])
    for key in (0, 1):
        one.store.remove(key)
    assert three.cluster.get_each(range(3)) == [value(0), None, value(2)]
    damage(one.store, 3)
    two.cluster.put("other", b"")
    assert two.store.put(3, value(3)) is STORED  # untold
    two.node.entries.publish_changes()
    assert three.cluster.get(3) == value(3)


def test_cached_location_of_a_closed_host_is_skipped(hosts):
    one, two, three = hosts.several(3)
    one.cluster.put("a", value(1))
    assert three.cluster.get("a") == value(1)
    two.cluster.fetch(["a"])
    one.node.close()
    assert three.cluster.get("a") == value(1)


def test_host_whose_engine_responds_is_not_marked_silent(hosts):
    one, none = hosts.make("one"), hosts.make("none", 0)
    backoff, name = none.node.backoff, one.node.name
    member = none.node.member(name)
    backoff._lasts_s = 600.0
    late = TransferError(name, "no answer", kind=FailureKind.TIMED_OUT)

    def noted_before(call, *args, **options):
        backoff.failed(member, late)  # of another thread
        assert member in backoff
        return call(*args, **options)

    client = none.node.client
    with is_asked(one):
        for owner, call, use in (
            (client, "_put_inline", lambda: none.cluster.put("a", value(1)) is STORED),
            (none.node.reads, "_read_inline", lambda: none.cluster.get("a") == value(1)),
            (client, "_remove_inline", lambda: none.cluster.remove("a")),
        ):
            with replaced(owner, call, noted_before):
                assert use()
            assert member not in backoff


def test_locations():
    now = SimpleNamespace(asked=[])

    def ask(keys: np.ndarray) -> list[list[str]]:
        now.asked.append(keys[:, 0].tolist())
        return [["p"] if key % 2 else [] for key in keys[:, 0].tolist()]

    def keys(*numbers: int) -> np.ndarray:
        return np.array([(n, 7) for n in numbers], np.uint64).reshape(-1, 2)

    locations = Locations(SimpleNamespace(holders=ask), 60.0)
    pools, is_remembered = locations.find(keys(1, 2, 3))
    assert pools == [["p"], [], ["p"]] and is_remembered == [False] * 3
    pools, is_remembered = locations.find(keys(3, 2, 1))  # what is nowhere is asked for again
    assert pools == [["p"], [], ["p"]] and is_remembered == [True, False, True]
    locations.forget(keys(1))
    locations.find(keys(1, 3))
    locations.find(keys(1, 3), anew=True)
    assert now.asked == [[1, 2, 3], [2], [1], [1, 3]]
    soon = Locations(SimpleNamespace(holders=ask), 0.0)
    soon.find(keys(1))
    assert soon.find(keys(1))[1] == [False]
    locations.find(np.stack([np.arange(1, 140_001, 2), np.ones(70_000)], axis=1).astype(np.uint64))
    assert len(locations._found) == 65_536 and locations.find(keys(3))[1] == [False]
