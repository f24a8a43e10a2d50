"""``ClusterStore.begin``: objects written in place, and abandoned ones."""

import gc
import time

import pytest

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import PutResult
from mooncake_serving.store import Quota, Store

from ..support import BEING_WRITTEN, EXISTS, STORED
from .support import UNIT, value


def begun(host, key, num_bytes=UNIT, **options):
    put = host.cluster.begin(key, num_bytes, **options)
    assert not isinstance(put, PutResult), put
    return put


def write(put, num_bytes=UNIT, seed=1):
    put.view[:] = value(seed, num_bytes)


def test_object_is_visible_once_committed(hosts):
    one, two, none = hosts.make("one"), hosts.make("two"), hosts.make("none", 0)
    put = begun(one, "a")
    assert put.num_bytes == UNIT and put.is_open and put.result is None
    for host in (one, two, none):
        assert host.cluster.get("a") is None and not host.cluster.exists("a")
    assert one.cluster.begin("a", UNIT) is BEING_WRITTEN
    assert two.cluster.begin("a", UNIT) is BEING_WRITTEN
    assert one.cluster.put("a", b"x") is two.cluster.put("a", b"x") is BEING_WRITTEN
    write(put)
    assert put.commit() is STORED is put.result and not put.is_open
    for host in (one, two, none):
        assert host.cluster.get("a") == value(1, UNIT)
        assert host.cluster.begin("a", UNIT) is EXISTS
    put.abort()  # nothing after a commit
    assert two.cluster.get("a") == value(1, UNIT)
    with pytest.raises(InvalidArgument, match="committed or aborted"):
        put.commit()
    with pytest.raises(InvalidArgument, match="closed"):
        write(put)


def test_a_with_block_commits_unless_it_fails(hosts):
    one, two = hosts.make("one"), hosts.make("two")
    with begun(one, "a") as put:
        write(put)
    assert put.result is STORED and two.cluster.get("a") == value(1, UNIT)
    with pytest.raises(RuntimeError), begun(one, "b") as put:
        raise RuntimeError
    assert put.result is None and not two.cluster.exists("b")
    with begun(two, "b") as put:  # no one has a claim to it
        write(put, seed=2)
    assert one.cluster.get("b") == value(2, UNIT)


def test_dropped_put_frees_its_room_and_claim(hosts):
    one, two = hosts.make("one"), hosts.make("two")
    free = one.store.stats().free_bytes
    put = begun(one, "a")
    assert one.store.stats().free_bytes < free
    del put
    gc.collect()
    assert one.store.stats().free_bytes == free
    assert one.cluster.put("a", value(3)) is STORED  # its own, at once
    assert two.cluster.get("a") == value(3)
    put = begun(one, "b")
    del put
    gc.collect()
    assert one.cluster.put("c", value(4)) is STORED  # the claim goes with the next put
    assert two.cluster.put("b", value(5)) is STORED


def test_claim_of_dropped_put_is_released_by_renewal(hosts):
    one, two = hosts.several(2)
    puts = one.cluster.begin_each(["a", "b"], [UNIT] * 2)
    assert two.cluster.put("a", value(2)) is BEING_WRITTEN
    del puts
    gc.collect()
    one.node.membership._renew_once()
    assert two.cluster.put_each(["a", "b"], [value(2)] * 2) == [STORED] * 2
    assert one.cluster.get("a") == value(2)


@pytest.mark.parametrize("draining", [False, True])
def test_put_in_place_goes_to_another_node(hosts, draining):
    two = hosts.make("two")
    one = hosts.make("one", 64 * UNIT if draining else 0)
    if draining:
        one.node.set_draining(True)
    put = begun(one, "a", 3 * UNIT)
    assert put.buffer.num_bytes == 3 * UNIT and bytes(put.view) == bytes(3 * UNIT)
    write(put, 3 * UNIT)
    assert not two.cluster.exists("a")
    assert put.commit() is STORED and two.store.get("a") == value(1, 3 * UNIT)
    assert one.cluster.begin("a", 3 * UNIT) is EXISTS
    other = begun(one, "b")
    assert two.cluster.put("b", value(2)) is STORED  # no one had a claim
    assert other.commit() is EXISTS and one.cluster.get("b") == value(2)
    dropped = begun(one, "c")
    dropped.abort()
    for what in ("view", "buffer"):
        with pytest.raises(InvalidArgument, match="committed or aborted"):
            getattr(dropped, what)
    assert two.cluster.put("c", value(2)) is STORED


def test_no_node_takes_it(hosts):
    one = hosts.make("one", 0)
    with pytest.raises(Unavailable, match="no node with a pool"):
        one.cluster.begin("a", UNIT)
    two = hosts.make("two", 8 * UNIT)
    one.node.members(anew=True)
    assert one.cluster.begin("a", 9 * UNIT) is PutResult.FULL  # no pool is so large
    assert one.cluster.begin("a", 2**63) is PutResult.FULL
    put = begun(one, "a")
    two.close()
    with pytest.raises(Unavailable, match="no node with a pool"):
        put.commit()
    assert not put.is_open


def test_begin_without_room_gives_its_claim_back(hosts):
    one, two = hosts.make("one", 8 * UNIT), hosts.make("two")
    held = begun(one, "a", 8 * UNIT)
    assert one.cluster.begin("b", UNIT) is PutResult.FULL
    assert two.cluster.put("b", value(1)) is STORED  # the claim was given back
    held.abort()
    with pytest.raises(InvalidArgument, match="num_bytes"):
        one.cluster.begin("c", 9 * UNIT)
    assert two.cluster.put("c", value(1)) is STORED


def test_begin_evicts_and_respects_quotas(hosts):
    one = hosts.make("one", store=Store.create(8 * UNIT, evict_ratio=0.0, quota=Quota(6 * UNIT)))
    two = hosts.make("two")
    for key in range(6):
        assert one.cluster.put(key, value(key)) is STORED
    with begun(one, 9, 4 * UNIT) as put:
        write(put, 4 * UNIT)
    assert two.cluster.exists_each(range(6)).tolist() == [False] * 4 + [True] * 2
    assert two.cluster.get(9) == value(1, 4 * UNIT)
    with pytest.raises(InvalidArgument, match="key must be an integer in a namespace with"):
        one.cluster.begin("name", UNIT)


def test_commit_after_close_is_rejected(hosts):
    one = hosts.make("one")
    put = begun(one, "a")
    one.cluster.close()
    with pytest.raises(InvalidArgument, match="node must be open"):
        put.commit()
    put.abort()
    with pytest.raises(InvalidArgument, match="node must be open"):
        one.cluster.begin("b", 1)


def test_begin_and_commit_in_batches(hosts, monkeypatch):
    one, two, none = hosts.make("one"), hosts.make("two"), hosts.make("none", 0)
    asked = []
    for name in ("claim", "publish"):
        call = getattr(hosts.directory, name)
        monkeypatch.setattr(
            hosts.directory,
            name,
            lambda who, keys, *rest, call=call, name=name, **options: (
                asked.append((name, len(keys))) or call(who, keys, *rest, **options)
            ),
        )
    assert two.cluster.put(2, value(2)) is STORED
    asked.clear()
    a, b, again, there = one.cluster.begin_each([0, 1, 0, 2], [UNIT, 2 * UNIT, UNIT, UNIT])
    assert again is BEING_WRITTEN and there is EXISTS
    write(a, seed=3)
    write(b, 2 * UNIT, seed=4)
    assert one.cluster.commit_each([a, b]) == [STORED, STORED] == [a.result, b.result]
    assert [call for call in asked if call[1]] == [("claim", 3), ("publish", 2)]
    assert two.cluster.get_each([0, 1]) == [value(3, UNIT), value(4, 2 * UNIT)]
    assert one.cluster.begin_each([], []) == [] == one.cluster.commit_each([])
    assert none.cluster.begin_each([], []) == []

    puts = none.cluster.begin_each([0, 5, 6], [UNIT] * 3)
    assert puts[0] is EXISTS
    for put in puts[1:]:
        write(put, seed=5)
    assert none.cluster.commit_each(puts[1:]) == [STORED, STORED]
    assert two.cluster.get_each([5, 6]) == [value(5, UNIT)] * 2


def test_error_in_a_batch_leaves_nothing_begun(hosts):
    one, two = hosts.make("one", 8 * UNIT), hosts.make("two")
    free = one.store.stats().free_bytes
    with pytest.raises(InvalidArgument, match="num_bytes"):
        one.cluster.begin_each([0, 1, 2], [UNIT, UNIT, 9 * UNIT])
    with pytest.raises(InvalidArgument, match="num_bytes"):
        one.cluster.begin_each([0, 1], [UNIT, -1])
    with pytest.raises(InvalidArgument, match="num_bytes must be as many"):
        one.cluster.begin_each([0, 1], [UNIT])
    assert one.store.stats().free_bytes == free
    assert two.cluster.put_each([0, 1, 2], [value(i) for i in range(3)]) == [STORED] * 3
    puts = one.cluster.begin_each([3, 4, 5], [6 * UNIT, 6 * UNIT, UNIT])
    assert puts[1] is PutResult.FULL
    assert two.cluster.put(4, value(4)) is STORED  # its claim was given back
    puts[2].abort()
    write(puts[0], 6 * UNIT)
    with pytest.raises(InvalidArgument, match="committed or aborted"):
        one.cluster.commit_each([puts[0], puts[2]])
    assert puts[0].is_open and one.cluster.commit_each([puts[0]]) == [STORED]
    assert two.cluster.get(3) == value(1, 6 * UNIT)
    assert two.cluster.put(5, value(5)) is STORED


def test_put_that_outlives_its_claim(hosts):
    one, two = hosts.make("one", options={"claim_s": 0.2}), hosts.make("two")
    slow, lost, alone = one.cluster.begin_each(["a", "b", "c"], [UNIT] * 3)
    for put in (slow, lost, alone):
        write(put)
    time.sleep(0.3)
    assert two.cluster.put("b", value(2)) is STORED
    held = begun(two, "c")
    assert one.cluster.commit_each([slow, lost, alone]) == [STORED, EXISTS, BEING_WRITTEN]
    assert one.cluster.get("a") == two.cluster.get("a") == value(1, UNIT)
    assert one.cluster.get("b") == two.cluster.get("b") == value(2)
    held.abort()
    assert one.cluster.put("c", value(3)) is STORED  # nothing keeps it from that


def test_invalid_puts_are_not_committed(hosts):
    one, two, none = hosts.make("one"), hosts.make("two"), hosts.make("none", 0)
    put, sent = begun(one, "a"), begun(none, "b")
    for store, puts, reason in (
        (two.cluster, [put], "what this store has begun"),
        (one.cluster, [put, EXISTS], "what this store has begun"),
        (one.cluster, [put, put], "twice"),
        (none.cluster, [sent, sent], "twice"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            store.commit_each(puts)
    assert put.is_open and sent.is_open
    write(put)
    write(sent)
    assert one.cluster.commit_each([put]) == none.cluster.commit_each([sent]) == [STORED]
    assert two.cluster.get_each(["a", "b"]) == [value(1, UNIT)] * 2
