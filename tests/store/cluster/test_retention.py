"""How long objects are kept, where another node takes them."""

import pytest

from mooncake_kernels.pool import PutResult
from mooncake_serving.store import Store

from ..support import STORED
from .support import UNIT, kept_by, value

SOFT, HARD = 1, 2  # of PoolObjects.retention


@pytest.mark.parametrize("draining", [False, True])
def test_put_taken_by_another_node_keeps_retention_and_position(hosts, draining):
    one = hosts.make("one")
    other = hosts.make("other", 64 * UNIT if draining else 0)
    other.node.membership.refresh()
    if draining:
        other.node.set_draining(True)
    values = [value(i) for i in range(4)]
    put = other.cluster.put_from_each
    objects = [(part,) for part in values]
    assert put(range(4), objects, retention="hard", position=7) == [STORED] * 4
    assert put(range(4, 6), objects[:2], retention="soft") == [STORED] * 2
    assert other.cluster.put(6, value(6), retention="hard", position=1 << 40) is STORED
    assert other.cluster.put(7, value(7)) is STORED
    assert kept_by(one.store, range(8)) == [
        *((HARD, 7 + i) for i in range(4)), (SOFT, 0), (SOFT, 1), (HARD, 65535), (0, 0),
    ]  # fmt: skip
    for i in range(100, 200):
        assert other.cluster.put(i, value(i)) is STORED
    assert one.store.get_each([*range(4), 6]) == [*values, value(6)]


def test_put_in_place_taken_at_commit_keeps_retention_and_position(hosts):
    one, none = hosts.make("one"), hosts.make("none", 0)
    puts = none.cluster.begin_each(["a", "b"], [UNIT, UNIT], retention="hard", position=3)
    puts += none.cluster.begin_each(["c"], [UNIT])
    for put in puts:
        put.view[:] = value(1)
    assert none.cluster.commit_each(puts) == [STORED] * 3
    assert kept_by(one.store, ["a", "b", "c"]) == [(HARD, 3), (HARD, 4), (0, 0)]
    assert none.cluster.get_each(["a", "b", "c"]) == [value(1)] * 3


def test_put_of_an_existing_object_keeps_its_retention(hosts):
    one, none = hosts.make("one"), hosts.make("none", 0)
    one.store.put("a", value(1))  # and no one is notified
    assert none.cluster.put("a", value(1), retention="hard") is PutResult.EXISTS
    assert kept_by(one.store, ["a"]) == [(0, 0)]


def test_a_pull_without_options_keeps_them_normally(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1), retention="hard")
    keys = one.cluster.keyspace.keys(["a"])
    assert one.node.client.pull(two.node.name, keys, one.node.name) == [STORED]
    assert isinstance(two.store, Store) and kept_by(two.store, ["a"]) == [(0, 0)]
