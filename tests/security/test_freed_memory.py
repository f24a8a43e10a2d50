"""What peers can read of a pool: objects while they are pinned, and nothing else."""

import contextlib
import ctypes

import numpy as np
import pytest

from mooncake_kernels.buffers import as_buffer
from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.store.cluster.messages import PINNED
from mooncake_serving.store.directory import EmbeddedDirectory

from ..store.cluster.support import UNIT, Hosts, value
from .stranger import Stranger

pytest.importorskip("msgspec")

SIZE = 2 * UNIT


@pytest.fixture
def hosts():
    made = Hosts(EmbeddedDirectory())
    yield made
    made.close()


@pytest.fixture
def holder(hosts):
    return hosts.make("holder", transports=("tcp", "shm"))


@pytest.fixture(params=["tcp", "shm"])
def reader(request, holder):
    """An engine that knows all addresses of the holder."""
    reader = Stranger(holder.node.name, transport=request.param)
    if request.param == "shm":
        reader.peer.close()
        reader.peer = reader.engine.open(holder.node.name)
    yield reader
    reader.close()


def sees_anything(reader: Stranger, holder) -> bool:
    """Whether it can read any unit of the pool."""
    buffer = holder.store.pool.buffer
    for address in range(buffer.address, buffer.address + buffer.num_bytes, UNIT):
        with contextlib.suppress(TransferError):
            reader.read(address, UNIT)
            return True
    with pytest.raises(TransferError, match="may not read"):
        reader.read(buffer.address, UNIT)
    return False


def test_object_is_readable_only_while_pinned(holder, reader):
    holder.store.put_each(range(8), [value(i, SIZE) for i in range(8)])
    keys = holder.store.keyspace.keys(range(8))
    assert not sees_anything(reader, holder)
    token, [row] = reader.pin(keys[3:4])
    at = int(row["address"])
    assert row["status"] == PINNED and reader.read(at, SIZE) == value(3, SIZE)
    assert reader.read(at + 5, 100) == value(3, SIZE)[5:105]
    for address, num_bytes in ((at - 1, 2), (at + SIZE - 1, 2), (at, SIZE + 1), (at - UNIT, UNIT)):
        with pytest.raises(TransferError):
            reader.read(address, num_bytes)
    assert reader.release(token)
    assert not sees_anything(reader, holder)


def test_freed_memory_is_not_readable(holder, reader):
    """The memory of objects that were removed or evicted, that are written, or were given up."""
    store = holder.store
    store.put("removed", value(1, SIZE))
    at = store.view("removed").buffer.address
    store.remove("removed")
    with pytest.raises(TransferError):
        reader.read(at, SIZE)
    with store.begin("written", SIZE) as put:
        ctypes.memset(put.buffer.address, 3, SIZE)
        assert not sees_anything(reader, holder)
        put.abort()
    assert not sees_anything(reader, holder)
    for i in range(100):  # and evict
        store.put(i, value(i, SIZE))
    assert not sees_anything(reader, holder)


def test_releasing_one_pin_keeps_the_others(holder, reader):
    holder.store.put("a", value(1, SIZE))
    keys = holder.store.keyspace.keys(["a"])
    tokens = [reader.pin(keys) for _ in range(3)]
    for token, [row] in tokens:
        assert reader.read(int(row["address"]), SIZE) == value(1, SIZE)
        assert reader.release(token)
    with pytest.raises(TransferError):
        reader.read(int(row["address"]), SIZE)


def test_pins_of_departed_members_expire(holder, reader):
    holder.store.put("a", value(1, SIZE))
    _, [row] = reader.pin(holder.store.keyspace.keys(["a"]))
    holder.node._pins.release_gone({}, -1.0)
    with pytest.raises(TransferError):
        reader.read(int(row["address"]), SIZE)


def test_private_memory_of_a_node_is_not_readable(holder, reader):
    """What is registered for its own reads, and the staging area."""
    mine = np.full(SIZE, 9, np.uint8)
    region = holder.node.register(mine)
    with pytest.raises(TransferError):
        reader.read(region.address, SIZE)
    with holder.node.memory.lend(as_buffer(mine)):
        assert reader.read(region.address, SIZE) == mine.tobytes()
    with pytest.raises(TransferError):
        reader.read(region.address, SIZE)
    with holder.node.memory._slot() as address, pytest.raises(TransferError):
        reader.read(address, UNIT)
    holder.node.deregister(region)


def test_node_lists_no_regions(holder):
    with TransferEngine(transports=["shm"]) as engine, engine.open(holder.node.name) as peer:
        assert engine.regions(peer) == []


@pytest.mark.parametrize("transports", [("tcp",), ("shm",), ("local",)])
def test_nodes_read_each_other_by_address(hosts, transports):
    one, two = hosts.several(2, 128 * UNIT, transports=transports, by_key=False)
    one.cluster.put_each(range(8), [value(i, SIZE) for i in range(8)])
    assert two.cluster.get_each(range(8)) == [value(i, SIZE) for i in range(8)]
    assert two.node.client.pull(two.node.name, one.store.keyspace.keys(range(8)), one.node.name)
    assert two.store.get_each(range(8)) == [value(i, SIZE) for i in range(8)]
    none = hosts.make("none", 0, transports=transports, by_key=False)
    assert none.cluster.put("new", value(9, SIZE)).name == "STORED"
    assert two.cluster.get("new") == value(9, SIZE)
