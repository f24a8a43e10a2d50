"""Failures between hosts: damage, unavailable holders or directory, strangers."""

import contextlib
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mooncake_kernels.errors import (
    ChecksumError,
    FailureKind,
    InvalidArgument,
    TransferError,
    Unavailable,
)
from mooncake_kernels.pool import ObjectPool, PinnedObject, PutResult
from mooncake_serving.store import SsdTier, Store, TieredStore
from mooncake_serving.store.cluster import pinned_reads, pins
from mooncake_serving.store.cluster.messages import (
    PINNED,
    Pin,
    Pinned,
    Release,
    Released,
    key_bytes,
)
from mooncake_serving.store.directory import Claim

from ...transfer.certificates import authority
from ..support import BEING_WRITTEN, EXISTS, FULL, STORED, eventually
from .support import SHORT_TTL_S, UNIT, SomeDirectory, damage, replaced, value


@pytest.fixture
def away(hosts):
    """The directory as a client sees it that loses it."""
    return SomeDirectory(hosts.directory)


def test_damaged_copy_is_dropped_and_next_one_read(hosts):
    one, two = hosts.make("near"), hosts.make("far")
    three = hosts.make("near")  # asks the pool of its host first
    one.cluster.put("a", value(1))
    two.cluster.fetch(["a"])
    damage(one.store, "a")
    assert three.cluster.get("a") == value(1)
    assert not one.store.exists("a") and two.store.exists("a")
    damage(two.store, "a")
    with pytest.raises(ChecksumError, match="is damaged wherever it is"):
        three.cluster.get("a")
    assert not two.store.exists("a") and not three.cluster.exists("a")
    assert three.cluster.get("a") is None
    assert three.cluster.put("a", value(2)) is STORED


def test_object_put_again_after_damage_stays(hosts, tmp_path):
    """By its holder's node, when a reader elsewhere has found the former one damaged."""
    tier = SsdTier(tmp_path / "tier", 4 << 20, bucket_bytes=1 << 20)
    store = TieredStore(ObjectPool.create(64 * UNIT), tier, min_uses=1)
    one = hosts.make("one", store=store)
    assert one.cluster.put("a", value(1)) is STORED
    words = one.cluster.keyspace.keys(["a"])
    one.node._drop_damaged(words)
    assert one.store.get("a") == value(1)
    assert hosts.directory.holders(words) == [(one.node.pool_name,)]

    def verify_late(original, pinned):
        replacing.close()
        original(pinned)
        assert one.store.remove("a") and one.store.put("a", value(2)) is PutResult.STORED
        raise ChecksumError("the former one")

    with contextlib.ExitStack() as replacing:
        replacing.enter_context(replaced(PinnedObject, "verify", verify_late))
        found = one.node._pins.pin(("a reader", 1, 7), words, verify=True, keep_s=60)
    assert found["status"].tolist() == [PINNED] and one.store.get("a") == value(2)
    assert one.node._pins.release(("a reader", 1, 7))


def test_damage_is_reported_per_object(hosts):
    one, two = hosts.several(2)
    one.cluster.put_each(range(4), [value(i) for i in range(4)])
    damage(one.store, 2)
    buffers = np.zeros((4, UNIT), np.uint8)
    assert two.cluster.get_into_each(range(4), buffers).tolist() == [UNIT, UNIT, -4, UNIT]
    assert bytes(buffers[3]) == value(3)
    assert two.cluster.fetch(range(4)) == [STORED, STORED, None, STORED]
    damage(one.store, 0)
    damage(two.store, 0)
    with pytest.raises(ChecksumError):
        Store(two.store.pool, verify=1.0).get(0)
    eventually(lambda: one.node.num_readers() == 0)


def test_damage_in_transit_is_reported_per_object(hosts):
    one, two, three = hosts.several(3, by_key=False)
    one.cluster.put_each(range(4), [value(i) for i in range(4)])
    with one.store.view(2) as seen:
        bad = seen.tensor().data_ptr()

    def spoiled(read, peer, moves, **options):
        read(peer, moves, **options)
        if bad in [remote for _, remote, _ in moves]:
            raise TransferError(peer.name, "a range differs", kind=FailureKind.CHECKSUM)

    with replaced(two.node.memory, "read", spoiled):
        assert two.cluster.fetch(range(4)) == [STORED, STORED, None, STORED]
        with pytest.raises(ChecksumError):
            two.cluster.get(2)
        three.cluster.fetch([2])
        assert two.cluster.get(2) == value(2)  # from there
    assert one.store.get(2) == value(2)  # where it is right


def test_own_damaged_copy_is_replaced_from_another_host(hosts):
    one = hosts.make("one")
    two = hosts.make("two", store=Store.create(64 * UNIT, verify=1.0))
    one.cluster.put("a", value(1))
    for read in (
        two.cluster.get,
        lambda key: two.cluster.get_each([key])[0],
        lambda key: bytes(two.cluster.view(key).view),
    ):
        two.cluster.fetch(["a"])
        damage(Store(two.store.pool), "a")
        assert read("a") == value(1)
    two.cluster.fetch(["a"])
    one.store.remove("a")
    damage(Store(two.store.pool), "a")
    with pytest.raises(ChecksumError):
        two.cluster.get("a")
    assert two.cluster.get("a") is None


@pytest.mark.parametrize("verify", [0, 1])
def test_corrupted_read_is_repeated(hosts, verify):
    one, two = hosts.several(2, by_key=False, options={"verify": verify})
    one.cluster.put_each(range(3), [value(i) for i in range(3)])
    num_reads = 0

    def spoiled(read, peer, moves, **options):
        nonlocal num_reads
        num_reads += 1
        read(peer, moves, **options)
        if num_reads == 1:
            ctypes.memset(moves[1][0] + 7, 0, 1)

    into = np.zeros((3, UNIT), np.uint8)
    with replaced(two.node.memory, "read", spoiled):
        assert two.cluster.get_into_each(range(3), into).tolist() == [UNIT] * 3
    assert [bytes(row) for row in into] == [value(i) for i in range(3)] and num_reads == 4
    num_reads = 0
    with replaced(two.node.memory, "read", spoiled):
        assert two.cluster.fetch(range(3)) == [STORED] * 3
    assert two.store.get_each(range(3)) == [value(i) for i in range(3)] and num_reads == 4
    assert two.store.stats().num_writing == 0


def test_given_object_is_verified_on_arrival(hosts):
    one, two = hosts.make("one"), hosts.make("two", 0, by_key=False)

    def spoiled(read, peer, moves, **options):
        read(peer, moves, **options)
        ctypes.memset(moves[0][0] + 7, 0, 1)

    with replaced(one.node.memory, "read", spoiled):
        with pytest.raises(Unavailable, match="checksum: what has arrived is something else"):
            two.cluster.put("a", value(1))
    assert not one.store.exists("a") and one.store.stats().num_writing == 0
    assert two.cluster.put("a", value(1)) is STORED and one.store.get("a") == value(1)


def test_no_one_waits_for_the_release_of_verified_objects(hosts):
    one, two = hosts.several(2, by_key=False)
    one.cluster.put("a", value(1))
    go_on = threading.Event()

    def slow(release, token):
        go_on.wait(20)
        return release(token)

    with replaced(one.node._pins, "release", slow):
        assert two.cluster.get("a") == value(1)
        assert one.node.num_readers() == 1
        go_on.set()


def test_read_not_confirmed_by_its_holder_is_discarded(hosts, monkeypatch):
    monkeypatch.setattr(pinned_reads, "SOONER_BYTES", 0)
    one, two, three = hosts.several(3, by_key=False, options={"verify": 0})
    one.cluster.put("a", value(1))

    def took_it_for_dead(release, token):
        release(token)
        return False

    into = np.zeros(UNIT, np.uint8)
    with replaced(one.node._pins, "release", took_it_for_dead):
        assert three.cluster.get("a") is None
        assert three.cluster.get_into("a", into) is None
        assert three.cluster.fetch(["a"]) == [None] and three.store.stats().num_writing == 0
        keys = one.store.keyspace.keys(["a"])
        assert two.node.client.pull(three.node.name, keys, one.node.name, verify=False)
        assert not three.store.exists("a")
    two.cluster.fetch(["a"])
    with replaced(one.node._pins, "release", took_it_for_dead):
        assert three.cluster.get("a") == value(1)  # the next holder's


@pytest.mark.parametrize("verify", [0, 1])
def test_reader_taken_for_dead_never_returns_stale_data(hosts, verify, monkeypatch):
    monkeypatch.setattr(pinned_reads, "SOONER_BYTES", 0)
    one, two = hosts.several(2, by_key=False, ttl_s=SHORT_TTL_S, options={"verify": verify})
    one.cluster.put("a", value(1))

    def slow(read, *args, **options):
        read(*args, **options)
        assert one.node.num_readers() == 1
        two.node.membership._is_over.set()  # as if it had been stopped meanwhile
        hosts.directory.leave(two.node.name)
        eventually(lambda: one.node.num_readers() == 0)

    with replaced(two.node.memory, "read", slow):
        assert two.cluster.fetch(["a"]) == [STORED if verify else None]
    assert two.store.get("a") == (value(1) if verify else None)
    assert two.store.stats().num_writing == 0


def test_pins_of_a_reader_expire_with_its_membership(hosts):
    one, two = hosts.several(2, ttl_s=SHORT_TTL_S)
    one.cluster.put("a", value(1))
    keys = key_bytes(one.store.keyspace.keys(["a"]))
    answer = two.node._rpc.request(
        one.node.name, Pin, Pinned, 5.0, valid_s=600, keys=keys, verify=False
    )
    assert one.node.num_readers() == 1 and one.store.stats().num_pins == 1
    hosts.directory.leave(two.node.name)
    two.node.membership._is_over.set()  # it does not come back
    assert eventually(lambda: one.node.num_readers() == 0) and one.store.stats().num_pins == 0
    released = two.node._rpc.request(
        one.node.name, Release, Released, 5.0, token=answer.number, is_answered=True
    )
    assert not released.held


def test_pins_of_an_earlier_process_of_the_same_name_are_released(hosts):
    one, two = hosts.several(2, by_key=False)
    one.cluster.put("a", value(1))
    keys = one.store.keyspace.keys(["a"])
    two.node._rpc.request(
        one.node.name, Pin, Pinned, 5.0, valid_s=600, keys=key_bytes(keys), verify=False
    )
    two.node._rpc.life += 1  # as if it had been started again
    assert two.cluster.get("a") == value(1)
    eventually(lambda: one.node.num_readers() == 0)


def test_pin_granted_too_late_is_released(hosts):
    one = hosts.make("one")
    two = hosts.make("two", answer_s=0.3, by_key=False)
    one.cluster.put("a", value(1))
    go_on = threading.Event()

    def slow(pin, *args, **options):
        go_on.wait(20)
        return pin(*args, **options)

    with replaced(one.node._pins, "pin", slow):
        assert two.cluster.get("a") is None
        go_on.set()
        eventually(lambda: one.store.stats().num_pins > 0 or one.node.num_readers() == 0)
    eventually(lambda: one.node.num_readers() == 0)
    eventually(lambda: two.cluster.get("a") == value(1))  # answered in 0.3 s


@pytest.mark.parametrize("row", [(0, 0, 1 << 60, 0), (0, 2**64 - 8, UNIT, 0), (7, 1, 1, 0), None])
def test_a_holder_with_invalid_responses_is_skipped(hosts, row):
    one, two, three = hosts.make("near"), hosts.make("far"), hosts.make("near", by_key=False)
    one.cluster.put("a", value(1))
    two.cluster.fetch(["a"])

    def nonsense(pin, *args, **options):
        found = pin(*args, **options)
        found[:] = row or found
        return found if row else np.concatenate([found, found])

    with replaced(one.node._pins, "pin", nonsense):
        assert three.cluster.get("a") == value(1)


def test_one_of_many_writers_wins(hosts):
    made = hosts.several(3)
    none = hosts.make("none", 0)
    writers = [*made, none]
    barrier = threading.Barrier(len(writers))

    def write(i: int) -> list[PutResult]:
        barrier.wait()
        return writers[i].cluster.put_each(range(20), [value(100 * i + k, 300) for k in range(20)])

    with ThreadPoolExecutor(len(writers)) as pool:
        results = list(pool.map(write, range(len(writers))))
    for k in range(20):
        won = [i for i in range(len(writers)) if results[i][k] is STORED]
        assert len(won) == 1, results
        assert {results[i][k] for i in range(len(writers))} <= {STORED, EXISTS, BEING_WRITTEN}
        for host in writers:
            assert host.cluster.get(k) == value(100 * won[0] + k, 300)


def test_only_one_thread_of_a_node_writes_a_key(hosts):
    one, none = hosts.make("one"), hosts.make("none", 0)
    none.node.membership.refresh()
    for host, writes in ((one, (one.store, "put_key")), (none, (none.node.client, "put"))):
        others = []

        def written_twice(put, *args, host=host, others=others, **options):
            if not others:
                others.append(None)
                others[0] = host.cluster.put_each(["a", "b"], [value(2), value(3)])
            return put(*args, **options)

        with replaced(*writes, written_twice):
            assert host.cluster.put("a", value(1)) is STORED
        assert others[0] == [BEING_WRITTEN, STORED]
        assert one.cluster.get("a") == value(1)
        assert one.cluster.remove("a") and one.cluster.remove("b")
    assert one.cluster.put_each(["a", "a"], [value(1), value(2)]) == [STORED, EXISTS]


def test_object_lost_from_own_pool_can_be_put_again(hosts):
    one, two = hosts.several(2)
    one.cluster.put_each(["a", "b"], [value(1), value(2)])
    two.cluster.fetch(["b"])
    for key in ("a", "b"):
        one.store.remove(key)  # and no one was notified
    assert one.cluster.put_each(["a", "b"], [value(1), value(2)]) == [STORED, EXISTS]
    assert two.cluster.get("a") == value(1)


@pytest.mark.parametrize("limit, by_key", [("pins", True), ("pins", False), ("bytes", False)])
def test_holder_limits_simultaneous_pins(hosts, limit, by_key, monkeypatch):
    if limit == "bytes":
        monkeypatch.setattr(pins, "MAX_PINNED_BYTES", 3 * UNIT)
    pool = ObjectPool.create(64 * UNIT, num_pins=4 if limit == "pins" else 64)
    one, two = hosts.make("one", store=Store(pool)), hosts.make("two", by_key=by_key)
    one.cluster.put_each(range(30), [value(i) for i in range(30)])
    assert two.cluster.get_each(range(30)) == [value(i) for i in range(30)]
    eventually(lambda: one.node.num_readers() == one.store.stats().num_pins == 0)
    if limit == "pins":
        with contextlib.ExitStack() as held:
            for i in range(4):
                held.enter_context(one.store.view(i))
            monkeypatch.setattr(two.node.reads, "_answer_s", 1.0)  # for which it tries again
            assert two.cluster.get_each(range(30)) == [None] * 30
        assert two.cluster.get(29) == value(29)


def test_verified_read_succeeds_though_the_release_fails(hosts):
    pool = ObjectPool.create(64 * UNIT, num_pins=4)
    one, two = hosts.make("one", store=Store(pool)), hosts.make("two", by_key=False)
    one.cluster.put_each(range(10), [value(i) for i in range(10)])
    num_failures = 0

    def failing(release, member, token):
        nonlocal num_failures
        num_failures += 1
        release(member, token)
        raise TransferError(member.name, "it was closed")

    with replaced(two.node.reads._pinned, "_release", failing):
        assert two.cluster.fetch(range(10)) == [STORED] * 10
    assert num_failures == 2 and two.store.stats().num_writing == 0


def test_claim_of_a_failed_put_is_released(hosts):
    one, two = hosts.several(2, 4 * UNIT)
    one.cluster.put("stays", value(1, 3 * UNIT), retention="hard")
    assert one.cluster.put("a", value(1, 2 * UNIT)) is FULL
    with pytest.raises(InvalidArgument, match="value must be at most the pool's"):
        one.cluster.put("b", value(1, 5 * UNIT))
    num_puts = 0

    def put_key(original, *arguments, **options):
        nonlocal num_puts
        num_puts += 1
        if num_puts == 2:
            raise TimeoutError("a stopped process guards the pool")
        return original(*arguments, **options)

    with replaced(one.store, "put_key", put_key), pytest.raises(TimeoutError, match="stopped"):
        one.cluster.put_each(["c", "d", "e"], [value(1, UNIT), value(1), value(2)])
    assert two.cluster.get("c") == value(1)
    keys = one.store.keyspace.keys(["a", "b", "d", "e"])
    assert (hosts.directory.claim(two.node.name, keys, 1.0) == Claim.GRANTED).all()


def test_own_host_works_without_the_directory(hosts, away):
    one = hosts.make("one", directory=away, ttl_s=SHORT_TTL_S)
    two = hosts.make("two")
    two.cluster.put("theirs", value(1))
    one.cluster.put("ours", value(2))
    away.is_away = True
    assert one.cluster.get("ours") == value(2) and one.cluster.exists("ours")
    assert one.cluster.put("ours", value(3)) is EXISTS
    assert one.cluster.match_prefix(["ours"]) == 1
    for call in (
        lambda: one.cluster.get("theirs"),
        lambda: one.cluster.put("new", value(1)),
        lambda: one.cluster.get_into("theirs", np.zeros(UNIT, np.uint8)),
        lambda: one.cluster.exists_each(["ours", "theirs"]),
        lambda: one.cluster.match_prefix(["ours", "theirs"]),
        lambda: one.cluster.remove("theirs"),
        lambda: one.cluster.view("theirs"),
    ):
        with pytest.raises(Unavailable, match="the directory is away"):
            call()
    assert not one.node.claims._writing, "the next put has claims to end"
    with pytest.raises(Unavailable):
        hosts.make("three", directory=away)
    # What is evicted and put by others meanwhile is published once it is back.
    one.store.put("beside", value(4))
    one.store.evict(64 * UNIT)
    one.store.put("late", value(5))
    away.is_away = False
    eventually(lambda: two.cluster.get("late") == value(5))
    eventually(lambda: not two.cluster.exists("ours"))  # withdrawn after what is new
    assert not two.cluster.exists("beside")


def test_put_is_published_once_the_directory_returns(hosts, away):
    one, two = hosts.make("one", directory=away, ttl_s=SHORT_TTL_S), hosts.make("two")

    def goes(put, *args, **options):
        away.is_away = True
        return put(*args, **options)

    with replaced(one.store, "put_key", goes):
        assert one.cluster.put("a", value(1)) is STORED
    assert not two.cluster.exists("a")
    away.is_away = False
    eventually(lambda: two.cluster.get("a") == value(1))


def test_a_directory_that_lost_everything_is_filled_again(hosts, away):
    one, two = hosts.make("one", directory=away, ttl_s=SHORT_TTL_S), hosts.make("two")
    one.cluster.put_each(range(5), [value(i) for i in range(5)])
    away.is_away = True  # or it might be notified before somebody has looked
    hosts.directory.leave(one.node.name)
    assert not two.cluster.exists(3)
    away.is_away = False
    eventually(lambda: two.cluster.exists_each(range(5)).all())
    assert two.cluster.get(3) == value(3)


def test_holder_with_a_closed_engine_is_skipped(hosts):
    one, two, three = hosts.several(3)
    one.cluster.put("a", value(1))
    one.cluster.put("only there", value(2))
    two.cluster.fetch(["a"])
    one.node._server.close()
    one.engine.close()  # and yet a member
    for _ in range(5):
        assert three.cluster.get("a") == value(1)
    assert three.cluster.get("only there") is None
    with pytest.raises(Unavailable, match="it is not removed everywhere"):
        three.cluster.remove("only there")


def test_pool_served_by_two_nodes_survives_one(hosts):
    one = hosts.make("one")
    again = hosts.make("one", store=Store.open(one.store.pool.path))
    two = hosts.make("two")
    assert one.node.pool_name == again.node.pool_name != two.node.pool_name
    one.cluster.put("a", value(1))
    assert again.cluster.get("a") == value(1) and again.store.get("a") == value(1)
    one.node._server.close()
    one.engine.close()
    for _ in range(5):
        assert two.cluster.get("a") == value(1)
    one.node.close()
    assert two.cluster.exists("a") and two.cluster.get("a") == value(1)
    again.node.close()
    assert not two.cluster.exists("a")


@pytest.mark.parametrize("kind", ["secret", "tls"])
def test_cluster_with_a_secret_and_with_tls(hosts, kind, tmp_path):
    options = {"secret": b"what all of us know, and others do not"}
    if kind == "tls":
        options["tls"] = authority(tmp_path).tls("node")
    one, two = hosts.several(2, **options)
    stranger = hosts.make("stranger")
    one.cluster.put("a", value(1))
    assert two.cluster.get("a") == value(1)
    assert stranger.cluster.exists("a") and stranger.cluster.get("a") is None
    with pytest.raises(TransferError):
        stranger.node.client.stat(one.node.name)
    two.node.membership.refresh()
    assert two.cluster.stats().keys() == {one.node.pool_name, two.node.pool_name}
