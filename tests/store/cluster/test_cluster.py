"""Objects of several hosts: round trips, prefixes, ranges, evictions, nodes without a pool."""

import numpy as np
import pytest

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import ObjectPool, PutResult
from mooncake_serving.store import Quota, Store, set_quota

from ..support import EXISTS, FULL, STORED, eventually
from .support import UNIT, replaced, value


@pytest.mark.parametrize("transports", [["tcp"], ["shm", "tcp"], ["local", "shm", "tcp"]])
def test_objects_of_one_host_are_read_by_all(hosts, transports):
    one, two, none = (
        hosts.make("one", transports=transports),
        hosts.make("two", transports=transports),
        hosts.make("none", 0, transports=transports),
    )
    assert one.cluster.put("a", value(1)) is STORED
    assert two.cluster.put("a", value(2)) is EXISTS and none.cluster.put("a", value(3)) is EXISTS
    for host in (one, two, none):
        assert host.cluster.get("a") == value(1)
        assert host.cluster.exists("a") and not host.cluster.exists("b")
        assert host.cluster.get("b") is None
    assert two.store.get("a") is None  # it was not brought here
    assert two.cluster.fetch(["a", "b"]) == [STORED, None]
    assert two.store.get("a") == value(1) and two.cluster.fetch(["a"]) == [EXISTS]
    assert hosts.directory.num_objects(two.node.pool_name) == 1


def test_objects_evicted_for_a_quota_are_withdrawn(hosts):
    one = hosts.make("one", store=Store.create(64 * UNIT, quota=Quota(num_objects=2)))
    two = hosts.make("two")
    for i in range(10):
        assert one.cluster.put(i, value(i)) is STORED
    assert two.cluster.exists_each(range(10)).tolist() == [False] * 8 + [True] * 2
    assert two.cluster.put(0, value(0)) is STORED


def test_remote_objects_are_requested_once(hosts):
    one, two, none = hosts.make("one"), hosts.make("two"), hosts.make("none", 0)
    assert one.cluster.put("a", value(1)) is STORED

    def asked(original, *args):
        raise AssertionError("a claim has been asked for, and answered")

    with replaced(hosts.directory, "holders", asked):
        assert two.cluster.put_each(["a", "b"], [value(1), value(2)]) == [EXISTS, STORED]
        assert none.cluster.put_each(["a", "b", "c"], [value(1)] * 3) == [EXISTS, EXISTS, STORED]


@pytest.mark.parametrize("num_bytes", [0, 1, UNIT, 100_003, 64 << 20])
def test_sizes(hosts, num_bytes):
    large = 80 << 20 if num_bytes > 1 << 20 else 64 * UNIT
    one = hosts.make("one", large)
    two = hosts.make("two", large, staging_slots=1, slot_bytes=3 << 20)
    array = np.frombuffer(value(1, num_bytes), np.uint8)
    assert one.cluster.put(1, array) is STORED
    into = np.zeros(num_bytes, np.uint8)
    assert two.cluster.get_into(1, into) == num_bytes  # by way of staging
    np.testing.assert_array_equal(into, array)
    if 0 < num_bytes < large // 2:
        into[:] = 0
        region = two.cluster.register(into)
        assert two.cluster.get_into(1, into) == num_bytes  # at once
        np.testing.assert_array_equal(into, array)
        two.cluster.deregister(region)
    with two.cluster.view(1) as seen:
        assert seen.num_bytes == num_bytes
        np.testing.assert_array_equal(np.frombuffer(seen.view, np.uint8), array)


def test_name_keys_are_rejected_under_a_quota(hosts):
    host = hosts.make("one", store=Store.create(64 * UNIT, quota=Quota(10 * UNIT)))
    for call in (
        lambda: host.cluster.put("name", value(1)),
        lambda: host.cluster.put_each([1, "name"], [value(1), value(2)]),
    ):
        with pytest.raises(InvalidArgument, match="key must be an integer in a namespace with"):
            call()
    assert host.store.stats().num_ready == 0 and host.cluster.put(1, value(1)) is STORED


def test_remote_puts_respect_quotas_stored_in_the_pool(hosts):
    pool = ObjectPool.create(64 * UNIT)
    set_quota(pool, "", Quota(3 * UNIT))
    one = hosts.make("one", store=Store(pool, namespace="another"))
    two = hosts.make("two", 8 * UNIT)
    for key in range(10):
        assert two.cluster.put(key, value(key), preferred=[one.node.name]) is STORED
    assert pool.stats().num_ready == 3 and two.store.stats().num_ready == 0
    assert two.cluster.exists_each(range(10)).tolist() == [False] * 7 + [True] * 3
    assert one.store.usage() is None


def test_batch_that_evicts_its_own_head(hosts):
    """The directory has what is in the pool in the end, and no one has a claim to the rest."""
    one, two = hosts.make("one", 8 * UNIT), hosts.make("two")
    keys = list(range(30))
    assert one.cluster.put_each(keys, [value(i) for i in keys]) == [STORED] * 30
    here = one.store.exists_each(keys)
    assert here.sum() == 8
    listed = hosts.directory.holders(one.cluster.keyspace.keys(keys))
    assert [bool(pools) for pools in listed] == here.tolist()
    assert two.cluster.exists_each(keys).tolist() == here.tolist()
    assert two.cluster.match_prefix(keys) == 0
    gone = [key for key in keys if not here[key]]
    assert two.cluster.put_each(gone, [value(i) for i in gone]) == [STORED] * len(gone)


def test_object_evicted_before_publishing_is_withdrawn(hosts):
    one, two = hosts.several(2)

    def publish(original, *args, **options):
        one.store.evict(64 * UNIT)  # as another thread's put does; it withdraws
        return original(*args, **options)

    with replaced(hosts.directory, "publish", publish):
        assert one.cluster.put("a", value(1)) is STORED
    assert hosts.directory.holders(one.cluster.keyspace.keys(["a"])) == [()]
    assert two.cluster.put("a", value(1)) is STORED


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("has_pool", [False, True])
def test_wrong_arguments_leave_no_claim(hosts, has_pool, is_there):
    one, two = hosts.make("one"), hosts.make("two", 64 * UNIT if has_pool else 0)
    if is_there:
        one.cluster.put("a", value(1))
    for call, message in [
        (lambda: two.cluster.put("a", None), "^put: value must be"),
        (lambda: two.cluster.put("a", b"x", position=-1), "^put: position must be an integer in 0"),
        (lambda: two.cluster.put_from("a", b"x", None), r"^put_from: parts\[1\] must be"),
        (lambda: two.cluster.put_from("a", retention=[]), "^put_from: retention must be one of"),
        (
            lambda: two.cluster.put_from_each(["a"], [1]),
            r"^put_from_each: objects\[0\] must be a sequence of parts, got 1",
        ),
        (lambda: two.cluster.begin("a", -1), "^begin: num_bytes must be an integer in 0 to"),
        (
            lambda: two.cluster.begin_each(["a", "b"], [1, -1]),
            r"^begin_each: num_bytes\[1\] must be an integer in 0 to",
        ),
        (lambda: two.cluster.deregister(None), "deregister: region must be a Region, got None"),
    ]:
        with pytest.raises(InvalidArgument, match=message):
            call()
    assert two.cluster.get("a") == (value(1) if is_there else None)
    two.cluster.remove("a")
    assert two.cluster.put("a", value(2)) is STORED


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("has_pool", [False, True])
def test_invalid_batch_value_is_named_before_any_claim_or_put(
    hosts, has_pool, is_there, monkeypatch
):
    one, two = hosts.make("one"), hosts.make("two", 64 * UNIT if has_pool else 0)
    if is_there:
        one.cluster.put_each(["a", "b"], [value(1)] * 2)
    keys, ask = ["a", "b"], two.node.claims.ask
    monkeypatch.setattr(two.node.claims, "ask", lambda *_: pytest.fail("it claims keys"))
    for values, place in (([b"x", None], 1), (["text", b"x"], 0)):
        with pytest.raises(InvalidArgument, match=rf"^put_each: values\[{place}\] must be "):
            two.cluster.put_each(keys, values)
    with pytest.raises(InvalidArgument, match=r"^put_from_each: objects\[1\]\[2\] must be "):
        two.cluster.put_from_each(keys, [[], [b"x", b"x", None]])
    buffers = [bytearray(UNIT), b"read-only"]
    with pytest.raises(InvalidArgument, match=r"^get_into_each: buffers\[1\] must be writable"):
        two.cluster.get_into_each(keys, buffers)
    with pytest.raises(InvalidArgument, match=r"^get_into_each: buffers\[1\] must be a torch"):
        two.cluster.get_into_each(keys, [buffers[0], None])
    assert not any(buffers[0])
    if not is_there:
        monkeypatch.setattr(two.node.claims, "ask", ask)
        assert two.cluster.put_each(keys, [value(1)] * 2) == [STORED] * 2


def test_object_larger_than_own_pool_is_rejected_before_any_claim(hosts, monkeypatch):
    one, two = hosts.make("one", 128 * UNIT), hosts.make("two")
    half, large = bytes(40 * UNIT), bytes(64 * UNIT + 1)
    with monkeypatch.context() as patch:
        patch.setattr(two.node.claims, "ask", lambda *_: pytest.fail("it claims keys"))
        for call, place in [
            (lambda: two.cluster.put("a", large), "put: value"),
            (lambda: two.cluster.put_from("a", half, half), "put_from: parts"),
            (lambda: two.cluster.put_each(["a", "b"], [half, large]), r"put_each: values\[1\]"),
            (
                lambda: two.cluster.put_from_each(["a", "b"], [[half], [half, half]]),
                r"put_from_each: objects\[1\]",
            ),
        ]:
            with pytest.raises(InvalidArgument, match=rf"^{place} must be at most the pool's"):
                call()
    assert not two.cluster.exists_each(["a", "b"]).any()
    two.node.set_draining(True)  # then another takes it
    assert two.cluster.put("a", large) is STORED and one.store.exists("a")


def test_parts_and_ranges(hosts):
    one, two = hosts.several(2)
    layers = np.arange(60_000, dtype=np.float32).reshape(60, 1000)
    assert one.cluster.put_from("kv", *layers, value(1, 5)) is STORED
    parts = [np.zeros(n, np.uint8) for n in (1, 100_000, 139_999, 100)]
    assert two.cluster.get_into("kv", *parts) == 240_005
    assert b"".join(map(bytes, parts))[:240_005] == layers.tobytes() + value(1, 5)
    layer = np.zeros(1000, np.float32)
    assert two.cluster.get_into("kv", layer, offset=17 * 4000) == 240_005
    np.testing.assert_array_equal(layer, layers[17])
    with pytest.raises(InvalidArgument, match=r"buffers must have room for 240005 bytes, got 4000"):
        two.cluster.get_into("kv", layer)
    with pytest.raises(
        InvalidArgument, match=r"within the object's 240005 bytes, got 4000 from 23"
    ):
        two.cluster.get_into("kv", layer, offset=239_000)
    with pytest.raises(InvalidArgument, match="must be writable, got read-only"):
        two.cluster.get_into("kv", b"12345")


def test_prefix_spread_over_several_pools(hosts):
    one, two, three = hosts.several(3)
    keys = mk.block_hashes(np.arange(60, dtype=np.uint32), 4)
    blocks = [value(i, 1000 + i) for i in range(15)]
    assert one.cluster.put_each(keys[:6], blocks[:6]) == [STORED] * 6
    assert two.cluster.put_each(keys[:12], blocks[:12]) == [EXISTS] * 6 + [STORED] * 6
    for host in (one, two, three):
        assert host.cluster.match_prefix(keys) == 12
        assert host.cluster.exists_each(keys).tolist() == [True] * 12 + [False] * 3
        assert host.cluster.get_each(keys) == blocks[:12] + [None] * 3
        buffers = [np.zeros(1011 - 3 * (i == 11), np.uint8) for i in range(15)]
        sizes = [1000 + i for i in range(11)] + [-2] + [-1] * 3
        assert host.cluster.get_into_each(keys, buffers).tolist() == sizes
        for size, buffer, block in zip(sizes[:11], buffers, blocks, strict=False):
            assert bytes(buffer[:size]) == block
    assert three.store.stats().num_ready == 0
    assert three.cluster.fetch(keys) == [STORED] * 12 + [None] * 3
    assert three.store.get_each(keys) == blocks[:12] + [None] * 3


def test_namespaces_are_isolated(hosts):
    one, none = hosts.make("one"), hosts.make("none", 0, options={"namespace": "theirs"})
    one.cluster.put("a", value(1))
    assert none.cluster.get("a") is None
    with pytest.raises(InvalidArgument, match="namespace must be None where a store has its own"):
        type(one.cluster)(one.node, namespace="mine")


def test_more_objects_than_simultaneous_pins(hosts):
    one, two = hosts.several(2, 1000 * UNIT)
    values = [i.to_bytes(8, "little") for i in range(1000)]
    assert one.cluster.put_each(range(1000), values) == [STORED] * 1000
    assert two.cluster.get_each(range(1000)) == values


def test_evicted_objects_do_not_exist(hosts):
    one, two = hosts.several(2, 4 * UNIT)
    for i in range(6):
        assert one.cluster.put(i, value(i)) is STORED
    assert two.cluster.exists_each(range(6)).tolist() == [False] * 2 + [True] * 4
    assert two.cluster.get(0) is None and two.cluster.get(5) == value(5)
    assert two.cluster.put(0, value(7)) is STORED and one.cluster.get(0) == value(7)


def test_silent_eviction_is_reported_by_readers(hosts):
    one, two = hosts.several(2)
    one.cluster.put_each(range(3), [value(i) for i in range(3)])
    one.store.remove(1)
    assert two.cluster.exists(1)
    assert two.cluster.get_each(range(3)) == [value(0), None, value(2)]
    eventually(lambda: not two.cluster.exists(1))  # its node is notified, and no one waits
    assert two.cluster.put(1, value(9)) is STORED


def test_objects_of_a_node_without_a_pool_go_to_others(hosts):
    none = hosts.make("none", 0)
    with pytest.raises(Unavailable, match="put: no node with a pool takes it: there is none"):
        none.cluster.put("a", value(1))
    one, two = hosts.make("one", 4 * UNIT), hosts.make("two", 16 * UNIT)
    none.node.membership.refresh()
    layers = np.arange(300.0).reshape(3, 100)
    assert none.cluster.put_from("kv", *layers, b"end") is STORED
    assert two.store.get("kv") == layers.tobytes() + b"end"  # it has more room
    assert none.cluster.put_from("kv", *layers) is EXISTS
    assert none.cluster.put("empty", b"") is STORED and one.cluster.get("empty") == b""
    memory = np.frombuffer(value(3, 3 * UNIT), np.uint8).copy()
    region = none.cluster.register(memory)
    results = none.cluster.put_each(range(3), memory.reshape(3, UNIT))
    assert results == [STORED] * 3
    none.cluster.deregister(region)
    assert one.cluster.get_each(range(3)) == [bytes(row) for row in memory.reshape(3, UNIT)]
    assert none.cluster.put("too large", value(1, 20 * UNIT)) is FULL
    with pytest.raises(InvalidArgument, match="view: node must have a pool"):
        none.cluster.view("kv")
    assert none.cluster.stats().keys() == {one.node.pool_name, two.node.pool_name}


def test_remove_drops_all_copies(hosts):
    one, two, none = hosts.make("one"), hosts.make("two"), hosts.make("none", 0)
    one.cluster.put("a", value(1))
    two.cluster.fetch(["a"])
    assert none.cluster.remove("a") and not none.cluster.remove("a")
    for host in (one, two, none):
        assert not host.cluster.exists("a") and host.cluster.get("a") is None


def test_pull_copies_objects_on_request(hosts):
    one, two, three = hosts.several(3)
    one.cluster.put_each(range(5), [value(i) for i in range(5)])
    keys = one.store.keyspace.keys(range(7))
    pulled = three.node.client.pull(two.node.name, keys, one.node.name)
    assert pulled[:5] == [STORED] * 5 and pulled[5] == f"ABSENT at {one.node.name}"
    assert two.store.get_each(range(5)) == [value(i) for i in range(5)]
    assert three.node.client.pull(two.node.name, keys[:1], one.node.name) == [EXISTS]
    assert "is no member" in three.node.client.pull(two.node.name, keys[5:6], "nobody")[0]


def test_new_members_are_used_by_puts_and_removals(hosts):
    """A node that has not heard of another one yet asks the directory."""
    first = hosts.make("first", 0)
    second = hosts.make("second")
    assert first.cluster.put(1, value(1)) is PutResult.STORED
    assert second.store.get(1) == value(1)
    third = hosts.make("third")
    third.cluster.put_each([2, 3], [value(2), value(3)])
    assert first.cluster.remove_each([2, 3, 4]).tolist() == [True, True, False]
    assert third.store.exists_each([2, 3]).tolist() == [False, False]


@pytest.mark.parametrize("has_pool", [True, False])
@pytest.mark.parametrize("size", [UNIT, 5 << 20])
def test_key_named_twice_is_put_once(hosts, has_pool, size):
    one = hosts.make("one", 16 << 20)
    writer = one if has_pool else hosts.make("none", 0)
    values = [value(seed, size) for seed in range(3)]
    results = writer.cluster.put_each(["a", "b", "a"], values)
    assert results == [PutResult.STORED, PutResult.STORED, PutResult.EXISTS]
    assert one.store.get("a") == values[0]
    put, other = writer.cluster.begin_each(["c", "c"], [UNIT, UNIT])
    assert other is PutResult.BEING_WRITTEN
    put.abort()


@pytest.mark.parametrize("preferred", [(), ("two",)])
@pytest.mark.parametrize("has_pool", [True, False])
def test_key_named_twice_is_put_once_with_redis(hosts_with_redis, has_pool, preferred):
    two = hosts_with_redis.make("two", 16 << 20)
    writer = hosts_with_redis.make("one", (16 << 20) * has_pool)
    assert two.cluster.put("there", value(1)) is PutResult.STORED
    results = writer.cluster.put_each(
        ["new", "there", "new", "there"], [value(i) for i in range(4)], preferred=preferred
    )
    assert results == [PutResult.STORED, *[PutResult.EXISTS] * 3]
    assert writer.cluster.get("new") == value(0)


@pytest.mark.parametrize("has_pool", [True, False])
def test_key_named_twice_without_room_gets_one_answer(hosts, has_pool):
    one = hosts.make("one", 4 * UNIT)
    writer = one if has_pool else hosts.make("none", 0)
    for key in range(4):
        assert one.cluster.put(key, value(key), retention="hard") is PutResult.STORED
    assert writer.cluster.put_each(["a", "a"], [value(5), value(6)]) == [PutResult.FULL] * 2
