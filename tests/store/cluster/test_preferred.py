"""``ClusterStore.put`` and ``begin`` with ``preferred``: objects go first where the writer says."""

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.store.checks import RETENTIONS

from ..support import BEING_WRITTEN, EXISTS, FULL, STORED
from .support import UNIT, kept_by, replaced, value

LARGE = 5 << 20  # too large to be sent before it is claimed
CAPACITY = 4 * LARGE


@pytest.fixture(params=["hosts", "hosts_with_redis"], ids=["embedded", "redis"])
def hosts(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
def trio(hosts):
    return hosts.several(3, CAPACITY)


def holders(trio, *keys) -> list[str]:
    """For each object the hosts whose pools have it."""
    return ["".join(str(i) for i, host in enumerate(trio) if host.store.exists(k)) for k in keys]


def fill(host) -> None:
    """Have its pool take nothing more."""
    num_bytes = LARGE
    while num_bytes >= 64:
        key = f"{host.node.name} {host.store.stats().free_bytes}"
        if host.store.put(key, bytes(num_bytes), retention="hard") is FULL:
            num_bytes //= 2


def put_all_ways(cluster, preferred, num_bytes: int) -> list[str]:
    """Put objects by every call; return their keys."""
    keys = [f"{preferred} {i} {num_bytes}" for i in range(8)]
    values = [value(i, num_bytes) for i in range(8)]
    options = {"preferred": preferred}
    assert cluster.put(keys[0], values[0], **options) is STORED
    assert cluster.put_from(keys[1], values[1][:7], values[1][7:], **options) is STORED
    assert cluster.put_each(keys[2:4], values[2:4], **options) == [STORED] * 2
    objects = [[values[4]], [values[5][:7], values[5][7:]]]
    assert cluster.put_from_each(keys[4:6], objects, **options) == [STORED] * 2
    with cluster.begin(keys[6], num_bytes, **options) as put:
        put.view[:] = values[6]
    assert put.result is STORED
    [put] = cluster.begin_each(keys[7:], [num_bytes], **options)
    put.view[:] = values[7]
    assert cluster.commit_each([put]) == [STORED]
    assert cluster.get_each(keys) == values
    assert cluster.put(keys[0], b"other", **options) is EXISTS
    assert cluster.begin(keys[0], 5, **options) is EXISTS
    return keys


def test_objects_go_to_the_preferred_node(trio):
    one, two, _ = trio
    for preferred in ([two.node.name], ("host-1",), ["nobody", "host-1"], ["host-1", "host-0"]):
        assert holders(trio, *put_all_ways(one.cluster, preferred, UNIT)) == ["1"] * 8


def test_objects_go_to_this_node_by_default(trio):
    one = trio[0]
    for preferred in ((), ["nobody"], ["host-0", "host-1"], [one.node.name]):
        assert holders(trio, *put_all_ways(one.cluster, preferred, UNIT)) == ["0"] * 8


@pytest.mark.parametrize("retention", ["normal", "hard"])
def test_node_without_a_pool_puts_to_the_preferred_node(hosts, trio, retention):
    none = hosts.make("none", 0)
    for i in range(3):
        preferred = [f"host-{i}"]
        assert none.cluster.put(i, value(i), retention=retention, preferred=preferred) is STORED
        assert holders(trio, i) == [str(i)]
        assert kept_by(trio[i].store, [i])[0][0] == RETENTIONS.index(retention)
        assert holders(trio, *put_all_ways(none.cluster, preferred, UNIT)) == [str(i)] * 8


def test_large_objects_are_claimed_first(trio):
    one = trio[0]
    for i, result in enumerate((STORED, EXISTS)):
        large = value(1, LARGE + i)
        assert one.cluster.put("a", large, preferred=["host-2"]) is result
    assert holders(trio, "a") == ["2"] and one.cluster.get("a") == value(1, LARGE)


def test_full_preferred_node_is_skipped(trio):
    one, two, three = trio
    fill(two)
    assert holders(trio, *put_all_ways(one.cluster, ["host-1"], UNIT)) == ["0"] * 8
    assert holders(trio, *put_all_ways(one.cluster, ["host-1", "host-2"], UNIT)) == ["2"] * 8
    fill(three)
    assert holders(trio, *put_all_ways(one.cluster, ["host-2", "host-1"], UNIT)) == ["0"] * 8
    fill(one)
    assert one.cluster.put("a", value(1), preferred=["host-1"]) is FULL
    with one.cluster.begin("a", UNIT, preferred=["host-1"]) as put:
        pass
    assert put.result is FULL and not one.cluster.exists("a")


def test_preferred_pool_evicts_for_puts(trio):
    one, two, _ = trio
    assert two.cluster.put_each(range(3), [value(i, LARGE) for i in range(3)]) == [STORED] * 3
    for i in range(3, 9):
        assert one.cluster.put(i, value(i, LARGE), preferred=["host-1"]) is STORED
    assert holders(trio, 8) == ["1"] and not two.store.exists(0)
    assert one.store.stats().num_ready == 0


def test_preferred_node_accepts_objects_in_any_memory(trio):
    one = trio[0]
    options = {"retention": "hard", "preferred": ["host-1"]}  # "hard": not by the engine alone
    memory = np.frombuffer(value(1), np.uint8)
    with one.engine.register(memory[:10], "read"):
        assert one.cluster.put("a", memory, **options) is STORED
    assert one.cluster.put_from("b", *[b"x"] * 2049, **options) is STORED
    assert holders(trio, "a", "b") == ["1", "1"]
    assert one.cluster.get_each(["a", "b"]) == [value(1), b"x" * 2049]


def test_objects_that_do_not_fit_stay_here(hosts):
    one, two = hosts.make("one"), hosts.make("two", 4 * UNIT)
    one.node.members(anew=True)
    keys, values = range(8), [value(i) for i in range(8)]
    results = one.cluster.put_from_each(
        keys, [[each] for each in values], retention="hard", preferred=["two"]
    )
    assert results == [STORED] * 8
    there = [two.store.exists(i) for i in keys]
    assert 0 < sum(there) < 8 and [not one.store.exists(i) for i in keys] == there
    assert one.cluster.get_each(keys) == values


def test_draining_preferred_node_is_skipped(trio):
    one, two, _ = trio
    two.node.set_draining(True)  # one does not know yet
    assert one.cluster.put("a", value(1), preferred=["host-1"]) is STORED
    assert one.cluster.put("b", value(1, LARGE), preferred=["host-1"]) is STORED
    one.node.members(anew=True)
    keys = put_all_ways(one.cluster, ["host-1"], UNIT)
    assert holders(trio, "a", "b", *keys) == ["0"] * 10
    two.node.set_draining(False)
    one.node.set_draining(True)
    assert holders(trio, *put_all_ways(one.cluster, ["host-0", "host-1"], 7)) == ["1"] * 8


def test_closed_preferred_node_is_skipped(trio):
    one, two, _ = trio
    two.engine.close()  # as if killed: it is a member for a while
    assert one.cluster.put("a", value(1), preferred=["host-1"]) is STORED
    assert one.cluster.put("b", value(1), preferred=["host-1"]) is STORED
    assert holders(trio, "a", "b") == ["0"] * 2
    error = Unavailable("no answer")
    error.timed_out = True
    one.node.backoff.failed(one.node.member(two.node.name), error)
    with replaced(one.cluster._writes, "_offer", lambda *_: pytest.fail("it was silent just now")):
        assert one.cluster.put("c", value(1), preferred=["host-1"]) is STORED


def test_hung_preferred_node_is_waited_for_once(trio):
    one, two, _ = trio
    error = Unavailable("no answer")
    error.timed_out = True

    def directly(*_, **options):
        one.node.backoff.failed(one.node.member(two.node.name), error)

    with (
        replaced(one.cluster._writes, "_put_at", directly),
        replaced(one.cluster._writes, "_offer", lambda *_: pytest.fail("it was silent just now")),
    ):
        assert one.cluster.put("a", value(1), preferred=["host-1"]) is STORED
    assert holders(trio, "a") == ["0"]


def test_existing_objects_stay_where_they_are(trio):
    one, two, three = trio
    assert one.cluster.put("one", value(1)) is three.cluster.put("three", value(3)) is STORED
    results = one.cluster.put_each(["one", "new", "three"], [value(9)] * 3, preferred=["host-1"])
    assert results == [EXISTS, STORED, EXISTS]
    assert holders(trio, "one", "new", "three") == ["0", "1", "2"]
    with one.cluster.begin("four", UNIT):
        assert one.cluster.put("four", value(9), preferred=["host-1"]) is BEING_WRITTEN
        assert two.cluster.put("four", value(9), preferred=["host-2"]) is BEING_WRITTEN
    assert one.cluster.remove("new") and holders(trio, "new") == [""]


def test_several_preferences_in_one_commit(trio):
    one = trio[0]
    puts = [one.cluster.begin(i, UNIT, preferred=[f"host-{i}"]) for i in range(3)]
    for i, put in enumerate(puts):
        put.view[:] = value(i)
    assert one.cluster.commit_each(puts) == [STORED] * 3
    assert holders(trio, *range(3)) == ["0", "1", "2"]


def test_failed_commit_leaves_unsent_puts_open(trio):
    one = trio[0]
    puts = [one.cluster.begin(i, UNIT, preferred=[f"host-{i}"]) for i in (1, 2)]
    for put in puts:
        put.view[:] = value(1)

    def fails(*_):
        raise Unavailable("the directory does not answer")

    with replaced(one.cluster._writes, "put_each", fails), pytest.raises(Unavailable):
        one.cluster.commit_each(puts)
    assert one.cluster.commit_each(puts[1:]) == [STORED]
    assert holders(trio, 1, 2) == ["", "2"]


def test_object_larger_than_the_own_pool_is_rejected(trio):
    with pytest.raises(InvalidArgument, match="at most the pool's"):
        trio[0].cluster.begin("a", CAPACITY + 1, preferred=["host-1"])
    assert not trio[0].cluster.exists("a")


def test_no_node_takes_it(hosts):
    none = hosts.make("none", 0)
    with pytest.raises(Unavailable, match="no node with a pool takes it"):
        none.cluster.put("a", value(1), preferred=["host-1"])
