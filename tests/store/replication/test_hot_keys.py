"""Objects that are often read from other hosts are copied closer."""

import numpy as np

from mooncake_serving.store.cluster.hot_keys import HotKeys

from ...threads import in_threads
from ..cluster.support import SomeDirectory, value
from .support import hosts_with


def test_hot_object_is_copied_here(hosts):
    one = hosts.make("one")
    two = hosts.make("two", options={"hot": HotKeys(2)})
    one.cluster.put_each(["hot", "cold"], [value(1), value(2)])
    for _ in range(2):
        assert two.cluster.get("hot") == value(1)
    assert two.cluster.get("cold") == value(2)
    assert hosts_with([one, two], "hot") == ["one"]
    assert two.cluster.get("hot") == value(1)
    assert hosts_with([one, two], "hot") == ["one", "two"]
    assert hosts_with([one, two], "cold") == ["one"]
    assert two.store.get("hot") == value(1)
    assert hosts.directory.num_objects(two.node.pool_name) == 1


def test_max_copies_bounds_hot_copies_of_a_batch(hosts):
    one = hosts.make("one")
    readers = [hosts.make(f"r{i}", options={"hot": HotKeys(0, max_copies=3)}) for i in range(4)]
    keys = list(range(10))
    one.cluster.put_each(keys, [value(i, 1000) for i in keys])
    for reader in readers:
        into = np.zeros((10, 1000), np.uint8)
        assert reader.cluster.get_into_each(keys, list(into)).tolist() == [1000] * 10
        assert [row.tobytes() for row in into] == [value(i, 1000) for i in keys]
    for i in keys:
        assert hosts_with([one, *readers], i) == ["one", "r0", "r1"]


def test_evicted_hot_copy_waits_for_its_cooldown(hosts):
    one = hosts.make("one")
    two = hosts.make("two", options={"hot": HotKeys(0, cooldown_s=3600)})
    one.cluster.put("a", value(1))
    assert two.cluster.get("a") == value(1) and two.store.remove("a")
    two.node.entries.publish_all()
    for _ in range(5):
        assert two.cluster.get("a") == value(1)
    assert hosts_with([one, two], "a") == ["one"]


def test_hot_object_is_read_when_it_cannot_be_copied(hosts):
    directory = SomeDirectory(hosts.directory)
    one = hosts.make("one")
    two = hosts.make("two", directory=directory, options={"hot": HotKeys(0)})
    none = hosts.make("none", 0, options={"hot": HotKeys(0)})
    one.cluster.put("a", value(1))
    for i in range(64):
        two.store.put(f"mine/{i}", value(i), retention="hard")
    assert two.cluster.get("a") == value(1) and not two.store.exists("a")
    two.node.set_draining(True)
    one.cluster.put("b", value(2))
    assert two.cluster.get("b") == value(2) and not two.store.exists("b")
    assert none.cluster.get("a") == value(1)


def test_many_readers_of_one_hot_object(hosts):
    one = hosts.make("one")
    two = hosts.make("two", options={"hot": HotKeys(3)})
    one.cluster.put("a", value(1))
    got = in_threads(*[lambda: [two.cluster.get("a") for _ in range(20)]] * 4)
    assert got == [[value(1)] * 20] * 4 and two.store.get("a") == value(1)
