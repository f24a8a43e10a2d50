"""Two hosts with separate networks, whose cable is cut: neither can reach the other's objects.

The directory is reached by a socket in the file system, past the cable. This process must have a
network namespace to itself, and be root in it: test_two_hosts.py sees to that.
"""

import contextlib
import ctypes
import multiprocessing
import os
import subprocess

import numpy as np
import pytest

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.pool import PutResult
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.store import ClusterStore, Node, Store, directory

from ....metadata.support import RedisServer
from ....transfer.two_hosts.hosts import CLONE_NEWNET, FAR, NEAR, shell
from ...support import eventually
from ..support import TTL_S, UNIT, Host, replaced, value

WAIT_S = 60
STORED, EXISTS = PutResult.STORED, PutResult.EXISTS
CUT, REPAIRED = "ip link set wire down", "ip link set wire up"


def make(servers, name: str, address: str, by_key: bool = True) -> Host:
    store = Store.create(64 * UNIT)
    engine = TransferEngine(f"{address}:0")
    node = Node(store, engine, servers, host=name, ttl_s=TTL_S, answer_s=2.0, read_s=2.0)
    if not by_key:
        node._peers.prefers_rpc = lambda *_: False
    return Host(store, engine, node, ClusterStore(node))


def received(pipe):
    assert pipe.poll(WAIT_S), "the far host does not answer"
    return pipe.recv()


def be_far(theirs, pipe, url: str) -> None:
    """The life of the far host: put what it is told to, until the near one hangs up."""
    theirs.close()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    pipe.send("alone")
    pipe.recv()
    with directory.connect(url) as servers:
        host = make(servers, "far", FAR)
        pipe.send("there")
        with contextlib.suppress(EOFError):
            while True:
                key, seed, num_bytes = pipe.recv()
                result = host.cluster.put(key, value(seed, num_bytes))
                pipe.send((result, host.node.num_readers()))
        host.close()


@pytest.fixture
def by_key():
    """Whether the near one reads so, see ``make_host``."""
    return True


@pytest.fixture
def far(tmp_path, by_key):
    """The pipe to the far host, and the near one."""
    shell("ip link set lo up")
    redis = RedisServer(tmp_path)
    url = f"unix://{tmp_path}/redis.sock"
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=be_far, args=(ours, theirs, url), daemon=True)
    process.start()
    theirs.close()
    try:
        received(ours)
        shell(f"ip link add wire type veth peer name wire netns {process.pid}")
        for words, address in (("", NEAR), (f"nsenter --target {process.pid} --net ", FAR)):
            shell(f"{words}ip link set lo up")
            shell(f"{words}ip addr add {address}/24 dev wire")
            shell(f"{words}ip link set wire up")
        ours.send("there is a network")
        received(ours)
        with directory.connect(url) as servers:
            near = make(servers, "near", NEAR, by_key=by_key)
            yield ours, near
            ours.close()
            process.join(WAIT_S)
            assert process.exitcode == 0, "the far host does not close"
            near.close()
    finally:
        process.kill()
        process.join()
        redis.stop()
        subprocess.run(["ip", "link", "del", "wire"], capture_output=True)


def put(pipe, key: str, seed: int, num_bytes: int = UNIT):
    """Have the far host put; what came of it, and how many readers it has."""
    pipe.send((key, seed, num_bytes))
    return received(pipe)


def test_objects_behind_a_partition_are_unavailable_until_it_heals(far):
    pipe, near = far
    assert put(pipe, "a", 1) == (STORED, 0)
    eventually(lambda: near.cluster.get("a") == value(1))
    shell(CUT)
    assert near.cluster.get("a") is None and near.cluster.exists("a")
    assert near.cluster.put("a", value(2)) is EXISTS and near.cluster.put("b", value(3)) is STORED
    with pytest.raises(Unavailable, match="it is not removed everywhere"):
        near.cluster.remove("a")
    assert put(pipe, "b", 4)[0] is EXISTS and put(pipe, "c", 5)[0] is STORED
    shell(REPAIRED)
    eventually(lambda: near.cluster.get("a") == value(1))
    eventually(lambda: near.cluster.get("c") == value(5))


@pytest.mark.parametrize("by_key", [False])
def test_partition_during_a_read(far):
    pipe, near = far
    assert put(pipe, "a", 1, 200_000)[0] is STORED

    def cut(read, *args, **options):
        shell(CUT)
        return read(*args, **options)

    into = np.zeros(200_000, np.uint8)
    with replaced(near.node.memory, "read", cut):
        assert near.cluster.get_into("a", into) is None
    shell(REPAIRED)
    eventually(lambda: near.cluster.get_into("a", into) == 200_000)
    assert bytes(into) == value(1, 200_000)
    # The pins of the read that failed end, though no one could be notified.
    keys = iter(range(1_000_000))
    eventually(lambda: put(pipe, f"key {next(keys)}", 1, 1)[1] == 0)


@pytest.mark.parametrize("by_key", [False])
def test_partition_after_the_data_was_read(far):
    pipe, near = far
    put(pipe, "a", 1)
    eventually(lambda: near.cluster.get("a") == value(1))  # by the connections it takes

    def cut(read, *args, **options):
        read(*args, **options)
        shell(CUT)

    with replaced(near.node.memory, "read", cut):
        assert near.cluster.get("a") == value(1)  # their checksum says that they are right
        assert near.cluster.get("a") is None
        assert near.cluster.fetch(["a"]) == [None] and not near.store.exists("a")
    shell(REPAIRED)
    eventually(lambda: near.cluster.get("a") == value(1))


@pytest.mark.parametrize("by_key", [False])
def test_partition_before_the_holder_confirms(far):
    pipe, near = far
    put(pipe, "b", 1)
    into = np.zeros(1000, np.uint8)

    def cut(read, *args, **options):
        read(*args, **options)
        shell(CUT)

    with replaced(near.node.memory, "read", cut):
        assert near.cluster.get_into("b", into, offset=0) is None  # a part has no checksum
    shell(REPAIRED)
    eventually(lambda: near.cluster.get("b") == value(1))


assert os.environ.get("MK_TEST_WORLD") == "two_hosts", "these tests need a network of their own"
