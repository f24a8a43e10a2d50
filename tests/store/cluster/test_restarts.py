"""A node that comes back under its name is another one: its objects are found at once."""

import contextlib
import threading

import pytest

from mooncake_kernels.errors import FailureKind, TransferError
from mooncake_kernels.pool import ObjectPool
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.store import ClusterStore, Node, SsdTier, Store, TieredStore
from mooncake_serving.store.cluster.membership import Lives
from mooncake_serving.store.cluster.messages import Pin, Pinned, key_bytes
from mooncake_serving.store.directory import EmbeddedDirectory, connect

from ...metadata.support import free_port
from ..support import STORED
from .processes import HostProcess, get, put
from .support import UNIT, Host, replaced, value

NEVER_S = 3600.0  # nothing is noticed by the passing of time


@pytest.fixture(params=["embedded", "redis"])
def directory(request):
    if request.param == "embedded":
        yield EmbeddedDirectory()
        return
    server, name = request.getfixturevalue("shared_redis"), f"test-{free_port()}"
    with connect(server.url, cluster=name) as made:
        yield made


class World:
    """Hosts of which some are at addresses of their own, and come back there."""

    def __init__(self, directory, transports):
        self.directory, self.transports = directory, transports
        self.closing = contextlib.ExitStack()

    def start(self, port: int, store: Store | None = None, num_units: int = 256, **options) -> Host:
        if store is None and num_units:
            store = Store.create(num_units * UNIT, evict_ratio=0.0)
        engine = TransferEngine(f"127.0.0.1:{port}", transports=self.transports)
        # A membership is renewed after a third of its time to live, so here never.
        options = {"host": str(port), "ttl_s": 600.0} | options
        node = Node(store, engine, self.directory, **options)
        host = Host(store, engine, node, ClusterStore(node))
        self.closing.callback(host.close)
        return host

    def crash(self, host: Host) -> None:
        """End a host as a kill does: the directory is not notified."""
        with replaced(self.directory, "leave", lambda leave, name: None):
            host.close()


@pytest.fixture(params=["local", "tcp", "shm"])
def world(request, directory):
    world = World(directory, {request.param, "tcp"})
    yield world
    world.closing.close()


@pytest.fixture
def ports():
    return free_port(), free_port()


def ends(world: World):
    return {"leaves": Host.close, "crashes": world.crash}


@pytest.mark.parametrize("end", ["leaves", "crashes"])
@pytest.mark.parametrize("by_key", [True, False])
def test_restarted_reader_reads_at_once(world, ports, end, by_key):
    one, two = (world.start(port) for port in ports)
    assert one.cluster.put("a", value(1)) is STORED
    two.cluster.fetch(["a"])  # by a connection that one's next engine does not have
    for _ in range(3):
        ends(world)[end](one)
        one = world.start(ports[0])
        for host in (one, two):
            if not by_key:
                host.node._peers.prefers_rpc = lambda *_: False
        assert one.cluster.exists("a") and one.cluster.get("a") == value(1)
        assert two.cluster.get("a") == value(1)
        assert not one.node._rpc._calls and not two.node._rpc._calls


@pytest.mark.parametrize("end", ["leaves", "crashes"])
def test_restarted_holder_is_read_at_once(world, ports, end):
    one, two = (world.start(port) for port in ports)
    for key in range(3):
        assert one.cluster.put(key, value(key)) is STORED
        assert two.cluster.get(key) == value(key)
        ends(world)[end](one)
        one = world.start(ports[0])
        assert two.cluster.get(key) is None  # it is another pool
        assert one.cluster.put(key, value(key + 50)) is STORED
        assert two.cluster.get(key) == value(key + 50)


@pytest.mark.parametrize("end", ["leaves", "crashes"])
def test_node_restarted_with_its_pool_or_disk_is_read(world, ports, end, tmp_path):
    """In a file, or on a disk behind a new pool."""
    pool, disk = tmp_path / "pool", tmp_path / "disk"
    with Store.create(256 * UNIT, pool, evict_ratio=0.0) as keeping:
        keeping.put("kept", value(1))
        two = world.start(ports[1])
        for _ in range(2):
            one = world.start(ports[0], Store.open(pool))
            assert two.cluster.get("kept") == value(1)
            ends(world)[end](one)
    for number in range(2):
        tier = SsdTier(disk, 4 << 20, bucket_bytes=1 << 20)
        store = TieredStore(ObjectPool.create(64 * UNIT), tier, min_uses=1)
        one = world.start(ports[0], store)
        if number == 0:
            assert one.cluster.put("on disk", value(2)) is STORED
            store.evict(store.pool.capacity_bytes)
            assert store.flush()
        assert two.cluster.get("on disk") == value(2)
        ends(world)[end](one)


def test_silent_holder_is_retried_after_a_restart(world, ports):
    """Without waiting until the silence is over, or the member is renewed."""
    one, two = (world.start(port) for port in ports)
    two.node.backoff._lasts_s = NEVER_S
    one.cluster.put("a", value(1))
    assert two.cluster.get("a") == value(1)
    late = TransferError(one.node.name, "no answer", kind=FailureKind.TIMED_OUT)
    two.node.backoff.failed(two.node.member(one.node.name), late)
    assert two.cluster.get("a") is None  # it hangs, as far as is known
    world.crash(one)
    one = world.start(ports[0])
    one.cluster.put("a", value(2))
    assert two.cluster.get("a") == value(2)


def test_requests_to_the_previous_node_fail_after_a_restart(world, ports):
    """They would never be answered, and the next node would be taken for silent."""
    one, two = (world.start(port) for port in ports)
    one.cluster.put("a", value(1))
    started = threading.Event()

    def stall(take, *message):
        started.set()  # and it is never answered

    failures = []

    def ask():
        keys = key_bytes(one.store.keyspace.keys(["a"]))
        try:
            two.node._rpc.request(
                one.node.name, Pin, Pinned, NEVER_S, valid_s=60.0, keys=keys, verify=False
            )
        except TransferError as error:
            failures.append(error.kind)

    with replaced(one.node._server, "_take", stall):
        # The receiver has bound it already.
        one.node._server._receiver._take = stall
        asking = threading.Thread(target=ask)
        asking.start()
        assert started.wait(60)
    world.crash(one)
    one = world.start(ports[0], num_units=0)
    two.node.members(anew=True)
    asking.join(60)
    # It was asked once more, in the place of the one before, and has no pool.
    assert failures == [FailureKind.REFUSED] and not two.node._rpc._calls
    assert two.node.member(one.node.name) not in two.node.backoff


def test_a_restarted_reader_loses_its_pins(world, ports):
    one, two = (world.start(port) for port in ports)
    one.cluster.put("a", value(1))
    keys = key_bytes(one.store.keyspace.keys(["a"]))

    def pin():
        return two.node._rpc.request(
            one.node.name, Pin, Pinned, 60.0, valid_s=600.0, keys=keys, verify=False
        )

    assert pin().rows()["num_bytes"] == len(value(1)) and one.node.num_readers() == 1
    world.crash(two)
    two = world.start(ports[1])
    assert two.cluster.get("a") == value(1)
    assert pin().rows()["num_bytes"] == len(value(1)) and one.node.num_readers() == 1
    one.node._pins.close()  # its end would wait for them


def test_locations_in_the_previous_pool_are_dropped(world, ports):
    one, two = (world.start(port) for port in ports)
    one.cluster.put("a", value(1))
    assert two.cluster.get("a") == value(1)
    keys = one.store.keyspace.keys(["a"])
    assert two.node.locations.knows_any(keys)
    one.close()
    world.start(ports[0])
    two.node.members(anew=True)
    assert not two.node.locations.knows_any(keys)
    assert not two.node._peers.is_open(f"127.0.0.1:{ports[0]}")


@pytest.mark.parametrize("restarts", [1, 2])
def test_killed_processes(shared_redis, restarts):
    """With a directory that takes the killed one for alive."""
    name = f"127.0.0.1:{free_port()}"
    other = HostProcess(shared_redis.url, "other")
    host = HostProcess(shared_redis.url, "host", engine_name=name)
    try:
        assert host.do(put, 1, value(1)) is STORED
        assert other.do(get, 1) == value(1)
        for number in range(restarts):
            host.kill()
            host = HostProcess(shared_redis.url, "host", engine_name=name)
            key = 10 + number
            assert other.do(put, key, value(key)) is STORED
            assert host.do(get, key) == value(key)
            assert host.do(put, key + 100, value(key + 100)) is STORED
            assert other.do(get, key + 100) == value(key + 100)
    finally:
        host.close()
        other.close()


def test_lives_detect_a_restarted_node():
    lives = Lives()
    assert [lives.meet("a", life) for life in (1, 1, 2, 2, 1)] == [False, False, True, False, True]
    lives.keep([])
    assert not lives.meet("a", 5)
