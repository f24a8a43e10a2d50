"""Nodes that leave without losing any objects."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.store import Store
from mooncake_serving.store.replication import draining
from mooncake_serving.store.replication.draining import drain
from mooncake_serving.store.replication.placement import Placement
from mooncake_serving.store.replication.replicator import Replicator

from ...threads import in_threads
from ..cluster.support import UNIT, SomeDirectory, kept_by, replaced, value
from ..support import STORED, WAIT_S, eventually
from .support import die, forget, hosts_with


def names(hosts) -> set[str]:
    return {member.name for member in hosts.directory.members()}


def test_drain_moves_unique_objects_and_leaves(hosts):
    made = hosts.several(3, 512 * UNIT)
    one = made[0]
    for i in range(300):
        assert one.cluster.put(i, value(i, 100 + i)) is STORED
    Replicator(one.cluster).replicate(range(100), 2)
    seen = []
    drained = drain(one.node, on_progress=lambda d: seen.append((d.num_moved, d.num_left)))
    assert (drained.num_moved, drained.num_copied, drained.num_left) == (300, 200, 0)
    assert drained.num_bytes == sum(100 + i for i in range(300))
    assert drained.has_left and drained.failed == {}
    assert one.node.name not in names(hosts)
    assert [moved + left for moved, left in seen] == [300] * 3
    assert [moved for moved, _ in seen] == [128, 256, 300]
    for host in made[1:]:
        assert host.cluster.get_each(range(300)) == [value(i, 100 + i) for i in range(300)]
    assert all(len(hosts_with(made, i)) == 1 for i in range(300))
    with pytest.raises(InvalidArgument, match="which is closed"):
        drain(one.node)


def test_drained_objects_keep_retention_and_position(hosts):
    one, two = hosts.several(2)
    for i, retention in enumerate(("normal", "soft", "hard", "hard")):
        assert one.cluster.put(i, value(i), retention=retention, position=i) is STORED
    two.cluster.fetch([3])  # as a copy that may go
    assert kept_by(two.store, [3]) == [(0, 0)]
    assert drain(one.node).has_left
    assert kept_by(two.store, range(4)) == [(0, 0), (1, 1), (2, 2), (2, 0)]
    for i in range(100, 200):
        assert two.cluster.put(i, value(i)) is STORED
    assert two.store.get_each([2, 3]) == [value(2), value(3)]


def test_drain_while_all_hosts_write_and_read(hosts):
    """Nothing that was acknowledged is lost, and no one is notified that it is not there."""
    made = hosts.several(3, 1 << 30)
    one, two, three = made
    acknowledged: list[int] = []
    problems: list[str] = []
    # Each pool has room for all of them: an evicted one would look like one that is lost.
    numbers = iter(range(one.store.stats().max_objects))
    is_over = threading.Event()

    def write(host) -> None:
        for i in numbers:
            if is_over.is_set():
                return
            try:
                if host.cluster.put(i, value(i, 64)) is STORED:
                    acknowledged.append(i)
            except (InvalidArgument, Unavailable) as error:
                if host is one and one.node._is_closed:
                    return  # by the drain, in the middle of a put that is not acknowledged
                problems.append(f"put {i}: {error}")

    def read() -> None:
        while not is_over.is_set():
            for i in acknowledged[-50:]:
                if three.cluster.get(i) != value(i, 64):
                    problems.append(f"get {i}")

    threads = [threading.Thread(target=write, args=(host,)) for host in (one, two)]
    threads.append(threading.Thread(target=read))
    for thread in threads:
        thread.start()
    eventually(lambda: one.store.stats().num_ready > 50)
    try:
        drained = drain(one.node)
        num_before = len(acknowledged)
        eventually(lambda: len(acknowledged) > num_before + 10)
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert drained.has_left and drained.failed == {} and drained.num_moved > 50
    assert one.node.name not in names(hosts)
    assert three.cluster.get_each(acknowledged) == [value(i, 64) for i in acknowledged]
    assert problems == []


def test_stopped_drain_can_be_resumed(hosts):
    one, two = hosts.several(2, 1024 * UNIT)
    for i in range(300):
        one.cluster.put(i, value(i, 64))
    stop = threading.Event()
    drained = drain(one.node, on_progress=lambda _: stop.set(), stop=stop)
    assert (drained.num_moved, drained.num_left, drained.has_left) == (128, 172, False)
    assert one.node.name in names(hosts) and one.node.is_draining
    assert one.cluster.put("new", value(7)) is STORED
    assert two.store.get("new") == value(7) and not one.store.exists("new")
    assert two.cluster.get_each(range(300)) == [value(i, 64) for i in range(300)]
    drained = drain(one.node)
    assert (drained.num_moved, drained.num_left, drained.has_left) == (172, 0, True)
    assert two.store.get_each(range(300)) == [value(i, 64) for i in range(300)]


def test_drain_stopped_while_another_process_writes(hosts, monkeypatch, caplog):
    monkeypatch.setattr(draining, "SAY_S", 0.0)
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    stop = threading.Event()
    begun = one.store.pool.begin((1, 2), 64)  # which the node knows nothing of
    with ThreadPoolExecutor(1) as executor:
        drained_later = executor.submit(drain, one.node, stop=stop)
        try:
            eventually(lambda: two.store.exists("a"))
            eventually(lambda: "waits for 1 puts into its pool" in caplog.text)
            stop.set()
            drained = drained_later.result(WAIT_S)
        finally:
            begun.abort()
    assert (drained.num_moved, drained.has_left) == (1, False)
    assert one.node.name in names(hosts) and one.node.is_draining
    assert drain(one.node).has_left


def test_objects_without_room_elsewhere_stay_and_are_reported(hosts):
    one, two = hosts.several(2, 16 * UNIT)
    for i in range(10):
        two.store.put(f"mine/{i}", value(i), retention="hard")
    two.node.set_draining(False)  # tells how full it is
    for i in range(16):
        one.cluster.put(i, value(i))
    drained = drain(one.node, placement=Placement())
    assert (drained.num_moved, drained.num_left, drained.has_left) == (6, 10, False)
    assert len(drained.failed) == 10
    assert set(drained.failed.values()) == {"no other pool has room"}
    assert two.cluster.get_each(range(16)) == [value(i) for i in range(16)]
    one.node.set_draining(False)
    assert one.cluster.put("back", value(1)) is STORED and one.store.exists("back")
    two.store.remove_all()
    assert drain(one.node).has_left
    objects = two.store.pool.objects().keys.tolist()
    assert {tuple(key) for key in objects} > set(drained.failed) and len(objects) == 11
    assert two.store.get("back") == value(1)


def test_node_leaves_once_unmovable_objects_are_gone(hosts):
    one, two = hosts.several(2, 16 * UNIT)
    for i in range(16):
        two.store.put(f"mine/{i}", value(i), retention="hard")
    two.node.set_draining(False)  # tells how full it is
    one.cluster.put("a", value(1))
    drained = drain(one.node, on_progress=lambda drained: drained.failed and one.store.remove("a"))
    assert drained.has_left and not drained.failed


def test_pool_served_by_another_node_is_not_drained(hosts):
    one = hosts.make("one")
    other = hosts.make("one", store=Store.open(one.store.pool.path))
    far = hosts.make("far")
    one.cluster.put("a", value(1))
    drained = drain(one.node)
    assert drained.has_left and drained.num_moved == 0
    one.engine.close()
    assert other.store.get("a") == far.cluster.get("a") == value(1)


def test_last_node_keeps_its_objects(hosts):
    one = hosts.make("one")
    one.cluster.put("a", value(1))
    drained = drain(one.node)
    assert not drained.has_left and len(drained.failed) == 1
    assert one.cluster.get("a") == value(1)
    with pytest.raises(Unavailable):
        one.cluster.put("b", value(2))


def test_draining_nodes_give_each_other_nothing(hosts):
    one, two, three = hosts.several(3, 512 * UNIT)
    for i in range(200):
        (one, two)[i % 2].cluster.put(i, value(i, 64))
    one.node.set_draining(True)
    two.node.set_draining(True)
    in_threads(*(partial(drain, host.node) for host in (one, two)))
    assert names(hosts) == {three.node.name}
    assert three.store.get_each(range(200)) == [value(i, 64) for i in range(200)]


def test_listed_but_missing_copy_is_recreated(hosts):
    one, two = hosts.several(2)
    Replicator(one.cluster).put("a", value(1), replicas=2)
    assert two.store.remove("a")  # and no one is notified
    drained = drain(one.node)
    assert drained.has_left and drained.num_copied == 1
    assert two.store.get("a") == value(1)


def test_drain_checks_that_a_keeping_copy_is_alive(hosts):
    made = hosts.several(3)
    one, *others = made
    Replicator(one.cluster).put("a", value(1), replicas=3)
    dead, living = sorted(others, key=lambda host: host.node.pool_name)  # in which order are asked
    die(dead)
    assert drain(one.node).has_left
    assert living.store.get("a") == value(1)


def test_copy_on_a_dead_host_does_not_count(hosts):
    one, dead, two = hosts.several(3)
    for i in range(20):
        one.cluster.put(i, value(i))
    Replicator(one.cluster).replicate(range(20), 3)
    die(dead)
    for i in range(20):
        assert two.store.remove(i)
    two.node.entries.publish_all()
    drained = drain(one.node)  # the directory says that the dead one has them
    assert not drained.has_left and len(drained.failed) == drained.num_left == 20
    forget(hosts.directory, dead)
    assert drain(one.node).has_left
    assert two.store.get_each(range(20)) == [value(i) for i in range(20)]


def test_drain_without_the_directory_is_unavailable(hosts):
    directory = SomeDirectory(hosts.directory)
    one = hosts.make("one", directory=directory)
    two = hosts.make("two")
    one.cluster.put("a", value(1))
    directory.is_away = True
    with pytest.raises(Unavailable):
        drain(one.node)
    assert one.store.get("a") == value(1)
    directory.is_away = False
    assert drain(one.node).has_left and two.store.get("a") == value(1)


def test_drain_of_a_node_without_a_pool_is_rejected(hosts):
    with pytest.raises(InvalidArgument, match="node must have a pool"):
        drain(hosts.make("none", 0).node)


def test_concurrent_drains_lose_nothing(hosts):
    made = hosts.several(2, 256 * UNIT)
    values = [value(i, 64) for i in range(100)]
    stored = Replicator(made[0].cluster).put_each(range(100), values, replicas=2)
    assert stored == [(STORED, 2)] * 100
    in_threads(*(partial(drain, host.node) for host in made))
    assert all(hosts_with(made, i) for i in range(100))


@pytest.mark.parametrize("by_key", [True, False])
def test_put_to_a_draining_node_goes_to_the_next(hosts, by_key):
    one, two, three = [
        hosts.make("one", 128 * UNIT),
        hosts.make("two"),
        hosts.make("three", 0, by_key=by_key),
    ]
    assert [member.name for member in three.cluster._writes.homes()] == [
        one.node.name,
        two.node.name,
    ]
    one.node.set_draining(True)
    with replaced(three.node, "members", lambda *_, **__: stale):
        stale = [replace(member, is_draining=False) for member in hosts.directory.members()]
        assert three.cluster.put("a", value(1)) is STORED
    assert two.store.get("a") == value(1) and one.store.stats().num_ready == 0
    one.node.set_draining(False)
    assert three.cluster.put("b", value(2)) is STORED and one.store.exists("b")


def test_put_to_a_pool_that_left_is_repeated_elsewhere(hosts):
    one, two, three = hosts.make("one", 128 * UNIT), hosts.make("two"), hosts.make("three", 0)

    def leave_then(put, member, *args, **options):
        answers = put(member, *args, **options)
        if member == one.node.name:
            forget(hosts.directory, one)
        return answers

    with replaced(three.node.client, "put", leave_then):
        assert three.cluster.put("a", value(1)) is STORED
    assert one.store.exists("a") and two.store.get("a") == value(1)
    assert three.cluster.get("a") == value(1)


def test_put_without_any_target_is_not_acknowledged(hosts):
    one, three = hosts.make("one"), hosts.make("three", 0)

    def leave_then(put, *args, **options):
        answers = put(*args, **options)
        forget(hosts.directory, one)
        return answers

    with replaced(three.node.client, "put", leave_then):
        with pytest.raises(Unavailable, match=f"{one.node.pool_name} has left"):
            three.cluster.put("a", value(1))


@pytest.mark.parametrize("way", ["put", "begin", "pull"])
def test_drain_waits_for_puts_already_admitted(hosts, way):
    one, two = hosts.several(2)
    two.cluster.put("copied", value(2))
    is_in, goes_on = threading.Event(), threading.Event()
    name = "put_key" if way == "put" else "begin_key"

    def slowly(original, *args, **options):
        is_in.set()
        eventually(goes_on.is_set)
        return original(*args, **options)

    def put() -> bool:
        if way == "put":
            return one.cluster.put("a", value(1)) is STORED
        if way == "begin":
            with one.cluster.begin("a", UNIT) as begun:
                begun.view[:] = value(1)
            return True
        keys = one.cluster.keyspace.keys(["copied"])
        return two.node.client.pull(one.node.name, keys, two.node.name) == [STORED]

    with ThreadPoolExecutor() as executor, replaced(one.store, name, slowly):
        putting = executor.submit(put)
        eventually(is_in.is_set)
        draining = executor.submit(drain, one.node)
        eventually(lambda: one.node.is_draining)
        time.sleep(0.1)
        assert not draining.done()
        goes_on.set()
        assert putting.result() and draining.result().has_left
    key, seed = ("copied", 2) if way == "pull" else ("a", 1)
    assert two.store.get(key) == value(seed) and one.node.name not in names(hosts)


def test_a_draining_node_lets_no_one_rely_on_what_it_has(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    two.cluster.fetch(["a"])
    one.node.admission.set_open(False)
    keys = one.cluster.keyspace.keys(["a"])
    assert two.node.client.pull(one.node.name, keys, two.node.name) == ["it is draining"]
