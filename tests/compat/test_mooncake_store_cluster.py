"""A store over several hosts: processes with pools of their own, and a directory in Redis."""

import socket
from functools import partial

import pytest
import torch

from mooncake_kernels.errors import CudaError
from mooncake_serving.compat.mooncake.store import (
    INVALID_PARAMS,
    NO_AVAILABLE_HANDLE,
    OBJECT_NOT_FOUND,
    RPC_FAIL,
    TRANSFER_FAIL,
    MooncakeDistributedStore,
    ParallelAxis,
    ReadTarget,
    ReplicateConfig,
    TensorParallelism,
    pools,
)
from mooncake_serving.store import Node

from ..metadata.support import eventually, free_port
from .store_processes import processes
from .store_support import Memory, reasons, settings_of, value_of

pytest.importorskip("redis")
pytest.importorskip("msgspec")

CAPACITY = 32 << 20
PUT_SHARD = "put_tensor_with_parallelism"
LONG = "n" * 500  # a name that does not fit into the first line of an object


def tp(rank: int, size: int, split_dim: int = 0) -> TensorParallelism:
    return TensorParallelism([ParallelAxis("tp", rank, size, split_dim)])


@pytest.fixture
def store(server):
    store = MooncakeDistributedStore()
    assert store.setup(settings_of(server.url)) == 0
    yield store
    assert store.close() == 0


@pytest.fixture
def other(server, store):
    with processes(settings_of(server.url)) as (other,):
        yield other


@pytest.mark.parametrize("text, seconds", [(None, 30), ("7", 7), ("1", 5)])
def test_others_may_take_as_long_as_a_transfer(server, monkeypatch, text, seconds):
    given = {}

    class SomeNode(Node):
        def __init__(self, *args, **options):
            given.update(options)
            super().__init__(*args, **options)

    monkeypatch.setattr("mooncake_serving.store.Node", SomeNode)
    monkeypatch.delenv("MC_TRANSFER_TIMEOUT", raising=False)
    if text is not None:
        monkeypatch.setenv("MC_TRANSFER_TIMEOUT", text)
    store = MooncakeDistributedStore()
    assert store.setup(settings_of(server.url)) == 0
    assert store.close() == 0
    assert given["answer_s"] == seconds


def test_wrong_transfer_timeout_is_refused(server, monkeypatch, caplog):
    monkeypatch.setenv("MC_TRANSFER_TIMEOUT", "soon")
    assert MooncakeDistributedStore().setup(settings_of(server.url)) == INVALID_PARAMS
    reasons(caplog, "MC_TRANSFER_TIMEOUT must be whole seconds, got 'soon'")


def test_values_of_other_hosts_are_read(store, other):
    memory = Memory(store)
    for i, num_bytes in enumerate((1, 4096, 300_000, 5 << 20)):
        value = value_of(i, num_bytes)
        assert other.call("put", f"k{i}", value) == 0
        assert store.get(f"k{i}") == bytes(store.get_buffer(f"k{i}")) == value
        assert store.get_size(f"k{i}") == num_bytes and store.is_exist(f"k{i}") == 1
        if num_bytes < memory.bytes.nbytes:
            assert store.get_into(f"k{i}", memory.address, num_bytes) == num_bytes
            assert memory.at(0, num_bytes) == value
    assert store.put("k0", b"again") == 0 and store.get("k0") == value_of(0, 1)
    assert other.call("get_batch", ["k0", "k9"]) == [value_of(0, 1), b""]


def test_a_tensor_with_shards_on_two_hosts(store, other):
    memory = Memory(store)
    tensor = torch.arange(8 * 6.0).reshape(8, 6)
    for rank, shard in enumerate(tensor.chunk(4)):
        put = store.put_tensor_with_parallelism if rank % 2 else partial(other.call, PUT_SHARD)
        assert put("k", shard, tp(rank, 4)) == 0
    for size, split_dim in ((1, 0), (2, 0), (8, 0), (3, 1)):
        for rank, shard in enumerate(tensor.chunk(size, split_dim)):
            target = ReadTarget("shard", tp(rank, size, split_dim))
            assert torch.equal(store.get_tensor_with_parallelism("k", target), shard)
            assert torch.equal(other.call("get_tensor_with_parallelism", "k", target), shard)
            room = 128 + shard.nbytes
            get_into = store.get_tensor_with_parallelism_into
            assert torch.equal(get_into("k", memory.address, room, target), shard)


def test_a_size_is_returned_without_reading_the_value(server, store):
    """Wherever it is: that of a damaged value, too."""
    other = MooncakeDistributedStore()
    assert other.setup(settings_of(server.url)) == 0
    value = value_of(0, 5000)
    assert other.put("there", value) == 0
    memory = other._running().backend._own.pool.memory().numpy()
    memory[memory.tobytes().index(value[:64])] ^= 1
    assert store.get_size("there") == other.get_size("there") == 5000
    assert store.get_size("nowhere") == other.get_size("nowhere") == OBJECT_NOT_FOUND
    assert other.get("there") == b"" and other.get_size("there") == OBJECT_NOT_FOUND
    assert other.close() == 0


def test_batches_of_local_and_remote_values(store, other):
    memory, p = Memory(store), 0
    p = memory.address
    here, there = value_of(1, 2000), value_of(2, 3000)
    assert store.put("here", here) == 0 and other.call("put", "there", there) == 0
    keys = ["there", "no", "here", "there", 5]
    targets = [p, p, p + 4000, p + 8000, p]
    codes = store.batch_get_into(keys, targets, [3000, 9, 2000, 2999, 9])
    assert codes == [3000, OBJECT_NOT_FOUND, 2000, INVALID_PARAMS, INVALID_PARAMS]
    assert memory.at(0, 3000) == there and memory.at(4000, 2000) == here
    pieces = [p + 20_000 + i * 200 for i in range(30)]
    assert store.batch_get_into_multi_buffers(["there"], [pieces], [[100] * 30]) == [3000]
    assert b"".join(memory.at(20_000 + i * 200, 100) for i in range(30)) == there
    found = store.get_into_ranges([p], [["there"]], [[[0, 50]]], [[[100, 2999]]], [[[50, 1]]])
    assert found == [[[50, 1]]] and memory.at(0, 51) == there[100:150] + there[2999:]
    assert store.batch_is_exist(["here", "there", "no"]) == [1, 1, 0]


def test_batches_of_removals_reach_all_hosts(store, other):
    assert other.call("put", "theirs", b"1") == store.put("ours", b"2") == 0
    wanted = ["theirs", "none", "ours", 5, "theirs"]
    assert store.batch_remove(wanted) == [0, OBJECT_NOT_FOUND, 0, INVALID_PARAMS, OBJECT_NOT_FOUND]
    assert other.call("batch_is_exist", ["theirs", "ours"]) == [0, 0]


def test_an_error_states_the_size_of_the_value(store, other, caplog):
    memory = Memory(store)
    p, at_least = memory.address, "size must be at least the value's 30 bytes, got"
    assert other.call("put", LONG, bytes(30)) == 0
    assert store.get_into(LONG, p, 10) == INVALID_PARAMS
    reasons(caplog, f"get_into: {at_least} 10$")
    assert store.batch_get_into([LONG], [p], [29]) == [INVALID_PARAMS]
    reasons(caplog, f"batch_get_into: {at_least} 29$")
    assert store.batch_get_into_multi_buffers([LONG], [[p, p + 50]], [[10, 15]]) == [INVALID_PARAMS]
    reasons(caplog, f"batch_get_into_multi_buffers: {at_least} 25$")
    assert store.get_into_ranges([p], [[LONG]], [[[0]]], [[[29]]], [[[2]]]) == [[[INVALID_PARAMS]]]
    reasons(caplog, "must be within the value's 30 bytes, got 2 from 29$")
    assert store.batch_get_into([LONG, LONG], [p, p], [30, 40]) == [30, 30]


@pytest.fixture
def asked(store, monkeypatch):
    """The questions to the store's directory since the last ``clear``, without its thread's."""
    asked: list[str] = []
    directory = store._running().backend._directory

    def counting(name):
        call = getattr(directory, name)

        def counted(*arguments, **options):
            asked.append(name)
            return call(*arguments, **options)

        return counted

    for name in ("claim", "publish", "withdraw", "remove", "abandon", "holders", "keys_of"):
        monkeypatch.setattr(directory, name, counting(name))
    return asked


def test_batch_takes_as_many_directory_calls_as_one_key(store, other, asked):
    n = 64
    memory, tensors = Memory(store), [torch.full((4,), i) for i in range(n)]
    pointers, sizes = [memory.address + 200 * i for i in range(n)], [100] * n
    values = [memory.at(200 * i, 100) for i in range(n)]

    def named(prefix):
        return [f"{prefix}{i}" for i in range(n)]

    assert other.call("put_batch", named("theirs"), values) == 0
    assert other.call("batch_put_tensor", named("tensors"), tensors) == [0] * n
    calls = {
        "put_batch": (named("a"), values),
        "batch_put_from": (named("b"), pointers, sizes),
        "batch_put_from_multi_buffers": (named("c"), [[p] for p in pointers], [[s] for s in sizes]),
        "batch_put_tensor": (named("d"), tensors),
        "batch_put_tensor_with_tp": (named("e"), tensors, 0, 2),
        "upsert_batch": (named("a"), values),
        "batch_upsert_from": (named("theirs"), pointers, sizes),
        "batch_upsert_tensor": (named("tensors"), tensors),
    }
    for name, arguments in calls.items():
        asked.clear()
        assert getattr(store, name)(*arguments) in (0, [0] * n)
        assert len(asked) <= 6, (name, asked)
    assert store.get_batch(named("c")) == other.call("get_batch", named("c")) == values
    assert other.call("batch_upsert_from", named("theirs"), [other.address] * n, sizes) == [0] * n
    assert other.call("upsert_batch", named("a"), values) == 0
    assert other.call("batch_upsert_tensor", named("tensors"), tensors) == [0] * n
    asked.clear()
    assert store.get_batch(named("a")) == values
    assert [bytes(one) for one in store.batch_get_buffer(named("theirs"))] == [bytes(100)] * n
    assert all(map(torch.equal, store.batch_get_tensor(named("tensors")), tensors))
    got = store.batch_get_tensor_into(named("tensors"), pointers, [200] * n)
    assert torch.equal(torch.stack(got), torch.stack(tensors))
    assert len(asked) <= 4, asked
    asked.clear()
    assert store.remove_by_regex("^a|^b") == 2 * n
    assert store.remove_all() == 6 * n
    assert len(asked) <= 20, asked


def test_one_wrong_value_of_a_batch(store, other):
    memory = Memory(store)
    p = memory.address
    huge = CAPACITY + 1
    assert other.call("put", "theirs", b"old") == 0
    keys = ["a", 5, "b", "c", "d", "theirs", "a"]
    pointers, sizes = [p, p, 8, p, p, p, p + 8], [10, 10, 10, 0, 11, 12, 13]
    wanted = [0, INVALID_PARAMS, INVALID_PARAMS, INVALID_PARAMS, 0, 0, 0]
    assert store.batch_put_from(keys, pointers, sizes) == wanted
    assert [store.get_size(key) for key in ("a", "d", "theirs")] == [10, 11, 3]
    assert store.batch_upsert_from(keys, pointers, sizes) == wanted
    assert [store.get_size(key) for key in ("a", "d", "theirs")] == [13, 11, 12]
    assert store.get("a") == memory.at(8, 13)
    assert store.put_batch(["e", "huge", "f"], [b"1", bytes(huge), b"2"]) == NO_AVAILABLE_HANDLE
    assert store.get_batch(["e", "huge", 5, "f"]) == [b"1", b"", b"", b"2"]
    tensor = torch.zeros(2)
    codes = store.batch_put_tensor(["t", "u", "v"], [tensor, "none", tensor])
    assert codes == [0, INVALID_PARAMS, 0]
    got = store.batch_get_tensor(["t", "a", "v", "none"])
    assert [one is None for one in got] == [False, True, False, True]


def test_a_gpu_error_of_one_value_fails_it_alone(store, monkeypatch):
    backend = store._running().backend
    put_from_each = backend._cluster.put_from_each

    def failing(names, *arguments, **options):
        if "bad" in names:
            raise CudaError("bad: an illegal address")
        return put_from_each(names, *arguments, **options)

    def put_from(name, *parts, **options):
        return failing([name], [parts], **options)[0]

    monkeypatch.setattr(backend._cluster, "put_from_each", failing)
    monkeypatch.setattr(backend._cluster, "put_from", put_from)
    memory = Memory(store)
    pointers = [memory.address] * 3
    for call in (store.batch_put_from, store.batch_upsert_from):
        assert call(["a", "bad", "b"], pointers, [10] * 3) == [0, TRANSFER_FAIL, 0]
    assert store.batch_is_exist(["a", "bad", "b"]) == [1, 0, 1]


def test_tensors_and_upserts(store, other):
    tensor = torch.rand(3, 5).to(torch.bfloat16)
    assert store.put_tensor("t", tensor) == 0
    assert torch.equal(other.call("get_tensor", "t"), tensor)
    assert other.call("upsert", "t", b"value") == 0
    assert store.get("t") == b"value"


def test_names_are_listed_from_all_hosts(store, other):
    assert store.put("mine-1", b"1") == 0
    for name in ("theirs-1", "theirs-2", LONG):
        assert other.call("put", name, b"1") == 0
    assert store.remove_by_regex("^theirs-2|^n+$") == 2
    assert other.call("batch_is_exist", ["theirs-1", "theirs-2", LONG]) == [1, 0, 0]
    assert store.remove_all() == 2
    assert other.call("batch_is_exist", ["mine-1", "theirs-1"]) == [0, 0]


def test_client_without_a_pool(server, store, other):
    client = MooncakeDistributedStore()
    assert client.setup(settings_of(server.url, 0)) == 0
    memory = Memory(client)
    assert client.put_from("a", memory.address, 100_000) == 0
    assert store.get("a") == client.get("a") == memory.at(0, 100_000)
    targets = [memory.address + 200_000, memory.address]
    assert client.batch_get_into(["a", 5], targets, [100_000, 9]) == [100_000, INVALID_PARAMS]
    assert memory.at(200_000, 100_000) == memory.at(0, 100_000)
    assert client.remove_all() == 1
    assert client.close() == 0


def test_pins_of_client_without_a_pool_hold(server, store, other):
    """Whoever takes the values keeps them, and all copies of them, however many others come."""
    client = MooncakeDistributedStore()
    assert client.setup(settings_of(server.url, 0)) == 0
    try:
        pinned = ReplicateConfig(replica_num=2, with_hard_pin=True)
        size = CAPACITY // 16
        names = ["a", "b", "c"]
        assert client.put("a", b"a" * size, pinned) == 0
        assert client.put_batch(["b"], [b"b" * size], pinned) == 0
        assert client.batch_put_session_start(["c"], [size], pinned) == [0]
        assert client.batch_put_session_end(["c"]) == [0]
        for i in range(64):
            assert client.put(f"other {i}", b"o" * size) == 0
        assert client.batch_is_exist(names) == [1] * 3
        assert [len(found) for found in store.batch_get_replica_desc(names).values()] == [2] * 3
        assert [len(client.get(name)) for name in names] == [size] * 3
    finally:
        assert client.close() == 0


def test_values_of_a_killed_process_are_lost(store, other):
    assert other.call("put", "theirs", b"1") == store.put("mine", b"2") == 0
    assert store.get("theirs") == b"1"
    other.kill()
    eventually(lambda: store.is_exist("theirs") == 0, "its values are still listed")
    assert store.get("theirs") == b"" and store.get("mine") == b"2"
    assert store.put("theirs", b"3") == 0 and store.get("theirs") == b"3"


def test_copies_outlive_a_killed_process(store, other):
    config = ReplicateConfig(replica_num=2)
    assert other.call("put", "theirs", b"1", config) == 0
    assert other.call("upsert_batch", ["changed"], [b"2"], config) == 0
    assert store.put("mine", b"3", ReplicateConfig(replica_num=5)) == 0  # as many as there can be
    other.kill()
    assert [store.get(name) for name in ("theirs", "changed", "mine")] == [b"1", b"2", b"3"]


def holders_of(store, names) -> list[set[str]]:
    """For each value the segments that have it."""
    return [
        {one.get_memory_descriptor().buffer_descriptor.transport_endpoint for one in found}
        for found in store.batch_get_replica_desc(names).values()
    ]


@pytest.mark.parametrize("has_pool", [True, False])
def test_values_go_to_the_preferred_segment(server, store, other, has_pool):
    """By every call that takes a configuration."""
    theirs = other.call("get_hostname")
    config = ReplicateConfig(preferred_segments=["gone:1", theirs])
    writer = MooncakeDistributedStore()
    assert writer.setup(settings_of(server.url, CAPACITY if has_pool else 0)) == 0
    try:
        memory, tensor = Memory(writer), torch.arange(6.0)
        address = memory.address
        for upsert in (False, True):
            put = "upsert" if upsert else "put"
            names = [f"{put} {i}" for i in range(10)]
            a, b, c, d, e, f, g, h, i, j = names
            assert getattr(writer, put)(a, b"value", config) == 0
            assert getattr(writer, f"{put}_parts")(b, b"a", b"b", config=config) == 0
            assert getattr(writer, f"{put}_batch")([c, d], [b"c", b"d"], config) == 0
            assert getattr(writer, f"{put}_from")(e, address, 9, config) == 0
            assert getattr(writer, f"batch_{put}_from")([f], [address], [9], config) == [0]
            pub = "upsert_pub_tensor" if upsert else "pub_tensor"
            assert getattr(writer, pub)(g, tensor, config) == 0
            batch = [h], [tensor], config
            assert getattr(writer, f"batch_{pub}")(*batch) == [0]
            shards = getattr(writer, f"{put}_tensor_with_parallelism")
            assert shards(i, tensor, config=config) == 0
            assert writer.batch_put_session_start([j], [9], config) == [0]
            assert writer.batch_put_session_end([j]) == [0]
            whole = [name for name in names if writer.is_exist(name)]
            assert set(names) - set(whole) <= {i}  # which is stored as its shards
            assert holders_of(store, whole) == [{theirs}] * len(whole)
        assert writer.get("put 1") == b"ab" and torch.equal(writer.get_tensor("put 6"), tensor)
    finally:
        assert writer.close() == 0


def test_preferences(store, other):
    mine, theirs = store.get_hostname(), other.call("get_hostname")
    store._running().backend._cluster.node.members(anew=True)
    configs = [
        ReplicateConfig(preferred_segment=theirs),
        ReplicateConfig(preferred_segment=theirs, preferred_segments=[mine]),
        ReplicateConfig(preferred_segments=[mine, theirs]),
        ReplicateConfig(preferred_segment="gone:1"),
        ReplicateConfig(preferred_segments=[theirs], replica_num=2),
    ]
    for i, config in enumerate(configs):
        assert store.put(f"k{i}", b"value", config) == 0
    expected = [{theirs}, {theirs}, {mine}, {mine}, {mine, theirs}]
    assert holders_of(store, [f"k{i}" for i in range(5)]) == expected


def test_replicas_go_to_the_other_preferred_segments(server, store, other):
    with processes(settings_of(server.url)) as (third,):
        segments = [one.call("get_hostname") for one in (other, third)]
        store._running().backend._cluster.node.members(anew=True)
        for i in range(8):
            config = ReplicateConfig(replica_num=2, preferred_segments=segments)
            assert store.put(f"k{i}", b"value", config) == 0
            assert store.put_batch([f"b{i}"], [b"value"], config) == 0
        names = [f"{kind}{i}" for kind in "kb" for i in range(8)]
        assert holders_of(store, names) == [set(segments)] * 16


def test_a_value_is_stored_if_the_directory_fails_before_its_copies(
    server, store, other, monkeypatch
):
    copies = store._running().backend._copies
    replicate = copies.replicate

    def without_directory(*arguments, **options):
        server.stop()
        return replicate(*arguments, **options)

    monkeypatch.setattr(copies, "replicate", without_directory)
    assert store.put("a", b"value", config=ReplicateConfig(replica_num=2)) == 0
    assert store.get("a") == b"value"


def test_calls_fail_without_the_directory_and_recover(server, store, caplog):
    store.put("mine", b"1")
    server.stop()
    assert store.get("mine") == b"1" and store.health_check() == 2
    caplog.clear()
    assert store.get("theirs") == b""
    reasons(caplog, "get: ")
    assert store.put("new", b"1") == store.get_size("theirs") == RPC_FAIL
    assert store.batch_get_into(["theirs"], [0], [0]) == [INVALID_PARAMS]
    server.start()
    eventually(lambda: store.put("new", b"1") == 0, "it does not come back")
    assert store.health_check() == 0


def test_removals_fail_without_the_directory(server, store, caplog):
    assert store.put("a", b"1") == 0
    server.stop()
    assert store.batch_remove(["a", 5]) == [RPC_FAIL, INVALID_PARAMS]
    reasons(caplog, "batch_remove: ")


def test_addresses_that_are_not_servers(caplog):
    store = MooncakeDistributedStore()
    settings = {"local_hostname": "127.0.0.1", "metadata_server": "P2PHANDSHAKE"}
    assert store.setup(settings | {"master_server_addr": "redis://127.0.0.1:1"}) == RPC_FAIL
    reasons(caplog, "setup: ")
    assert store.health_check() == 1


def test_processes_of_one_host_get_distinct_names(server, monkeypatch, caplog):
    """At a metadata server, where names are unique: each adds a free port to its host."""
    settings = settings_of(server.url) | {"metadata_server": server.url}
    one, two, three = (MooncakeDistributedStore() for _ in range(3))
    assert one.setup(settings) == two.setup(settings) == 0
    hosts, ports = zip(*(one.get_hostname().split(":") for one in (one, two)), strict=True)
    assert hosts == ("127.0.0.1", "127.0.0.1") and ports[0] != ports[1]
    assert all(int(port) in range(12300, 14301) for port in ports)  # as Mooncake's
    socket.create_connection((hosts[0], int(ports[0])), 30).close()  # it listens there, too
    assert one.put("a", b"1") == 0 and two.get("a") == b"1"
    taken = iter([int(port) for port in ports])
    reserve = pools._reserve_port
    monkeypatch.setattr(pools, "_reserve_port", lambda *args: next(taken, None) or reserve(*args))
    assert three.setup(settings | {"local_hostname": "127.0.0.1:0"}) == 0
    assert three.get("a") == b"1"
    assert three.get_hostname() not in (one.get_hostname(), two.get_hostname())
    assert one.close() == two.close() == three.close() == 0


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_foreign_local_hostname_is_rejected(server, caplog, host):
    settings = settings_of(server.url) | {"metadata_server": server.url, "local_hostname": host}
    assert MooncakeDistributedStore().setup(settings) == INVALID_PARAMS
    reasons(caplog, f"local_hostname must be a host of this machine .* got '{host}'")


def test_name_with_a_port_is_used_unchanged(server, caplog):
    settings = settings_of(server.url) | {"metadata_server": server.url}
    name = f"127.0.0.1:{free_port()}"
    one, two = MooncakeDistributedStore(), MooncakeDistributedStore()
    assert one.setup(settings | {"local_hostname": name}) == 0 and one.get_hostname() == name
    assert two.setup(settings | {"local_hostname": name}) == INVALID_PARAMS
    reasons(caplog, "name must be free")
    assert one.close() == 0
