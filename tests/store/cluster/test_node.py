"""A node's arguments, its end, and what it leaves behind."""

import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import mooncake_serving.store as store_package
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.store import ClusterStore, Node, Store
from mooncake_serving.store.cluster.node_server import MAX_PENDING, NUM_THREADS
from mooncake_serving.store.directory import EmbeddedDirectory

from ...transfer.resources import held, settled
from ..support import STORED, child, ended_well, eventually
from .support import SHORT_TTL_S, UNIT, Hosts, replaced, value


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ttl_s": 0}, "ttl_s must be a number above 0 and at most 600, got 0"),
        ({"answer_s": "soon"}, "answer_s must be a number above 0 and at most 600, got 'soon'"),
        ({"read_s": 1e9}, "read_s must be a number above 0"),
        ({"slot_bytes": 0.5}, "slot_bytes must be an integer above 0"),
        ({"staging_slots": -1}, "staging_slots must be an integer above 0"),
    ],
)
def test_wrong_arguments_are_named(hosts, options, message):
    with pytest.raises(InvalidArgument, match=message):
        hosts.make("one", 0, **options)


def test_wrong_arguments_of_calls_are_named(hosts):
    one = hosts.make("one")
    with pytest.raises(InvalidArgument, match="Node: store must be a Store or None, got 'pool'"):
        Node("pool", None, None)
    with pytest.raises(InvalidArgument, match="Node: engine must be a TransferEngine, got None"):
        Node(None, None, None)
    with pytest.raises(InvalidArgument, match="ClusterStore: node must be a Node, got None"):
        ClusterStore(None)
    with pytest.raises(InvalidArgument, match="claim_s must be above 0, got 0"):
        ClusterStore(one.node, claim_s=0)
    with pytest.raises(InvalidArgument, match="verify must be from 0 to 1, got 2"):
        ClusterStore(one.node, verify=2)
    with pytest.raises(InvalidArgument, match="values must be as many as keys, got 1 and 2"):
        one.cluster.put_each([1, 2], [b""])
    with pytest.raises(InvalidArgument, match="buffers must be as many as keys, got 0 and 1"):
        one.cluster.get_into_each([1], [])
    with pytest.raises(InvalidArgument, match="key"):
        one.cluster.get(-1)


def test_node_accepts_objects_in_any_memory(hosts):
    one = hosts.make("one")
    none = hosts.make("none", 0, by_key=False)
    assert none.cluster.put_from("a", *[b"x"] * 2048) is STORED
    assert none.cluster.put_from("b", *[b"x", b"y"] * 1025) is STORED  # more than a request has
    assert one.cluster.get("a") == b"x" * 2048 and one.cluster.get("b") == b"xy" * 1025
    memory = np.frombuffer(value(1), np.uint8)
    with none.engine.register(memory[:10], "read"):
        assert none.cluster.put("c", memory) is STORED
    assert none.cluster.put_from("d", memory[:10], memory) is STORED  # one overlaps the other
    assert one.cluster.get("c") == value(1) and one.cluster.get("d") == value(1)[:10] + value(1)
    none.engine.register(memory, "read").close()  # nothing of it is registered any more


def test_single_host_store_works_without_msgspec(monkeypatch):
    monkeypatch.setitem(sys.modules, "msgspec", None)
    cluster = "mooncake_serving.store.cluster"
    for module in [name for name in sys.modules if name.startswith(cluster)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.delattr(store_package, "cluster")
    with pytest.raises(Unavailable, match="Node: msgspec is not installed: pip install"):
        _ = store_package.Node
    with pytest.raises(AttributeError, match="has no attribute 'Nod'"):
        _ = store_package.Nod
    assert store_package.Store is Store


def test_an_engine_has_one_node_at_a_time(hosts):
    one, two = hosts.several(2)
    for store in (one.store, two.store, None):
        with pytest.raises(InvalidArgument, match="engine must be without a node, got .*has one"):
            Node(store, one.engine, hosts.directory)
    assert one.cluster.put("a", value(1)) is STORED and two.cluster.get("a") == value(1)
    one.cluster.close()
    with one.engine.register(one.store.pool.memory()), pytest.raises(InvalidArgument, match="over"):
        Node(one.store, one.engine, hosts.directory)
    with Node(one.store, one.engine, hosts.directory) as again:
        assert ClusterStore(again).get("a") == value(1)


@pytest.mark.parametrize("at", ["list_objects", "serve", "join"])
def test_failed_node_construction_leaves_nothing_behind(at):
    def fails(original, *args, **options):
        raise TimeoutError(f"{at}: a stopped process guards the pool")

    directory = EmbeddedDirectory()
    with Store.create(64 * UNIT) as store, TransferEngine() as engine:
        owner = {"list_objects": store, "serve": engine, "join": directory}[at]
        threads = {thread.name for thread in threading.enumerate()}
        with replaced(owner, at, fails), pytest.raises(TimeoutError, match=at):
            Node(store, engine, directory)
        assert {thread.name for thread in threading.enumerate()} == threads
        assert store.on_evicted == []
        engine.register(store.pool.buffer).close()  # as it may once only
        with Node(store, engine, directory) as node:
            assert [member.name for member in directory.members()] == [node.name]


def test_closed_node_leaves_and_rejects_calls(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))
    assert len(two.store.on_evicted) == 1
    two.cluster.close()
    two.cluster.close()
    assert two.store.on_evicted == []
    assert [member.name for member in hosts.directory.members()] == [one.node.name]
    assert two.store.put("b", value(2)) is STORED  # store and engine are still open
    two.engine.register(np.zeros(8)).close()
    for call in (
        lambda: two.cluster.get("a"),
        lambda: two.cluster.put("c", value(3)),
        lambda: two.cluster.fetch(["a"]),
    ):
        with pytest.raises(InvalidArgument, match="node must be open, got .*, which is closed"):
            call()


def test_close_waits_for_readers_to_finish(hosts):
    one, two = hosts.several(2, by_key=False)
    one.cluster.put("a", value(1))
    closing = threading.Thread(target=one.cluster.close)

    def begin_to_close(read, *args, **options):
        closing.start()
        eventually(lambda: one.node.name not in two.node.membership.refresh())
        return read(*args, **options)

    with replaced(two.node.memory, "read", begin_to_close):
        assert two.cluster.get("a") == value(1)
    closing.join()
    assert two.cluster.get("a") is None


def test_node_closed_during_a_remote_read(hosts):
    one, two = hosts.several(2, by_key=False)
    one.cluster.put("a", value(1))
    one.node._answer_s = 0.5  # for which its end waits for readers

    def closed(read, *args, **options):
        one.node.close()
        return read(*args, **options)

    with replaced(two.node.memory, "read", closed):
        assert two.cluster.get("a") is None
    assert one.store.stats().num_pins == 0
    with pytest.raises(TransferError, match="this side was closed"):
        one.node.client.stat(two.node.name)


@pytest.mark.parametrize("by_key", [True, False])
def test_no_one_waits_for_a_closed_node(hosts, by_key):
    """Its engine stays open. Who still takes it for a member is refused, and asks the next."""
    one, two = hosts.make("one", by_key=by_key), hosts.make("two", 32 * UNIT, by_key=by_key)
    none = hosts.make("none", 0, by_key=by_key)
    assert none.node.membership.homes[0].name == one.node.name
    one.cluster.put("a", value(1))
    assert none.cluster.exists("a")  # and it remembers where
    two.cluster.fetch(["a"])
    one.node.close()
    failures = []
    with replaced(none.node.backoff, "failed", lambda failed, *args: failures.append(args)):
        assert none.cluster.put("b", value(2)) is STORED
        assert none.cluster.put("c", value(3), retention="hard") is STORED
        assert none.cluster.get("a") == value(1)
        assert one.node.name not in [member.name for member in none.node.members()]
        assert none.cluster.put("d", value(4)) is STORED
    assert two.store.exists("b") and two.store.exists("c") and two.store.exists("d")
    assert [member.name for member, _ in failures] == [one.node.name] * 3
    assert {error.cause for _, error in failures} == {"the peer receives no notifications any more"}


def test_requests_queued_at_a_closing_node_are_refused(hosts):
    one, two = hosts.several(2, answer_s=30)
    server = one.node._server
    working, go_on = threading.Semaphore(0), threading.Event()

    def slow(answer, *args):
        working.release()
        assert go_on.wait(60)
        return answer(*args)

    def ask() -> str:
        try:
            return f"{two.node.client.stat(one.node.name).num_ready} objects"
        except TransferError as error:
            return error.cause

    with (
        replaced(server._handler, "handle", slow),
        ThreadPoolExecutor(NUM_THREADS + 5) as executor,
    ):
        carried_out = [executor.submit(ask) for _ in range(NUM_THREADS)]
        assert all(working.acquire(timeout=20) for _ in carried_out)
        waiting = [executor.submit(ask) for _ in range(3)]
        taken = len(carried_out + waiting)
        eventually(lambda: server._room._value == MAX_PENDING - taken)
        closing = executor.submit(one.node.close)
        eventually(lambda: not server._receiver._thread.is_alive())
        assert ask() == "the peer receives no notifications any more"
        go_on.set()
        closing.result()
    assert [future.result() for future in carried_out] == ["0 objects"] * NUM_THREADS
    assert [future.result() for future in waiting] == ["stat: the node is closed"] * 3


def test_a_forked_child_has_no_node(hosts):
    one, two = hosts.several(2)
    one.cluster.put("a", value(1))

    def life():
        for call in (lambda: two.cluster.fetch(["a"]), lambda: two.cluster.put("b", b"")):
            with pytest.raises(InvalidArgument, match="which is its parent's"):
                call()
        two.cluster.close()
        one.cluster.close()

    with child(life) as pid:
        assert ended_well(pid)
    assert two.cluster.get("a") == value(1) and one.cluster.put("b", b"") is STORED


def test_closed_hosts_leak_no_resources():
    def use() -> None:
        hosts = Hosts(EmbeddedDirectory())
        one, two = hosts.several(2, transports=["shm", "tcp"])
        assert one.cluster.put_each(range(20), [value(i) for i in range(20)]) == [STORED] * 20
        assert two.cluster.get_each(range(20)) == [value(i) for i in range(20)]
        hosts.close()

    use()  # what is made once, is
    before = held()
    for _ in range(3):
        use()
    assert settled(before), (str(before), str(held()))


def test_member_describes_its_host_and_pool(hosts):
    store = Store.create(64 * UNIT)
    one = hosts.make("one", store=store, host=None, ttl_s=SHORT_TTL_S)
    [member] = one.cluster.members()
    assert member.host.startswith(f"{os.uname().nodename}-")
    assert member.pool == one.node.pool_name and member.capacity_bytes == 64 * UNIT
    one.cluster.put("a", value(1))
    one.node.admission.set_open(False)

    def reported() -> tuple[bool, int]:
        [member] = one.cluster.members()
        return member.is_draining, member.free_bytes

    eventually(lambda: reported() == (True, 63 * UNIT))
    assert one.cluster.stats()[one.node.pool_name].num_ready == 1
