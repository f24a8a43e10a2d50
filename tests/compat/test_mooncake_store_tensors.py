"""Tensors of ``MooncakeDistributedStore`` in memory by address, as shards, and with a config."""

import struct

import numpy as np
import pytest
import torch

from mooncake_serving.compat.mooncake.store import (
    INVALID_PARAMS,
    OBJECT_NOT_FOUND,
    MooncakeDistributedStore,
    ReplicateConfig,
    _tensor_metadata_size,
)

from .store_support import reasons

WRONG = INVALID_PARAMS
TENSOR = torch.arange(24.0).reshape(4, 6)
OTHER = -TENSOR


def test_get_tensor_into_memory_and_put_from_it(store, memory):
    p = memory.address
    for i, dtype in enumerate((torch.float32, torch.bfloat16, torch.int64, torch.bool)):
        tensor = TENSOR.to(dtype)
        assert store.put_tensor(f"t{i}", tensor) == 0
        size = store.get_size(f"t{i}")
        into = store.get_tensor_into(f"t{i}", p + 4096, 4096)
        assert into.dtype == dtype and torch.equal(into, tensor)
        assert p + 4096 <= into.data_ptr() < into.data_ptr() + into.nbytes == p + 4096 + size
        assert size == _tensor_metadata_size() + tensor.nbytes
        assert store.put_tensor_from(f"u{i}", p + 4096, size) == 0
        assert torch.equal(store.get_tensor(f"u{i}"), tensor)
    memory.bytes[4096:8192] = 0
    assert torch.equal(into, torch.zeros_like(into))  # it is where it was put


def test_batches(store, memory):
    p = memory.address
    assert store.batch_put_tensor(["a", "b"], [TENSOR, OTHER]) == [0, 0]
    size = store.get_size("a")
    a, none, b = store.batch_get_tensor_into(["a", "none", "b"], [p, p, p + 4096], [size] * 3)
    assert torch.equal(a, TENSOR) and none is None and torch.equal(b, OTHER)
    codes = store.batch_put_tensor_from(["c", "d", "e"], [p, p + 4096, p], [size, size, 100])
    assert codes == [0, 0, WRONG]
    assert torch.equal(store.get_tensor("d"), OTHER) and store.is_exist("e") == 0
    assert store.batch_upsert_tensor_from(["c", "f"], [p + 4096] * 2, [size] * 2) == [0, 0]
    assert torch.equal(store.get_tensor("c"), OTHER) and torch.equal(store.get_tensor("f"), OTHER)
    assert store.upsert_tensor_from("c", p, size) == 0
    assert torch.equal(store.get_tensor("c"), TENSOR)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda s, p: s.get_tensor_into("t", p, 20), "size must be at least the value"),
        (lambda s, p: s.get_tensor_into("bytes", p, 4096), "must be one of put_tensor"),
        (lambda s, p: s.get_tensor_into("t", 0, 4096), "must be memory of this process"),
        (lambda s, p: s.get_tensor_into(5, p, 4096), "key must be a string"),
        (lambda s, p: s.put_tensor_from("n", p, 4096), "must be one of put_tensor"),
        (lambda s, p: s.put_tensor_from("n", p, 10), "must be one of put_tensor"),
        (lambda s, p: s.put_tensor_from("n", 0, 10), "must be memory of this process"),
        (lambda s, p: s.batch_get_tensor_into(["t"], [p, p], [1]), "must be as many as keys"),
        (lambda s, p: s.batch_put_tensor_from(["n"], [p, p], [1]), "must be as long as keys"),
        (lambda s, p: s.get_tensor_with_tp_into("t", p, 4096, 2, 2), "tp_rank must be below"),
        (lambda s, p: s.put_tensor_with_tp(5, TENSOR, 0, 2), "key must be a string"),
        (lambda s, p: s.put_tensor_with_tp("n", TENSOR, 0, 2, True), "split_dim must be an axis"),
        (lambda s, p: s.put_tensor_with_tp("n", torch.zeros(0, 4), 0, 2**63), "tp_size must div"),
        (lambda s, p: s.batch_upsert_tensor(["n"], [TENSOR, TENSOR]), "must be as many as keys"),
        (lambda s, p: s.batch_pub_tensor(["n"], [5]), "tensor must be a torch.Tensor"),
        (lambda s, p: s.pub_tensor("n", TENSOR, 5), "config must be a ReplicateConfig"),
        (lambda s, p: s.pub_tensor_with_tp("n", TENSOR, None, 0, 5), "tp_size must divide axis 0"),
    ],
)
def test_invalid_arguments(store, memory, caplog, call, reason):
    assert store.put_tensor("t", TENSOR) == 0 and store.put("bytes", b"abc") == 0
    assert call(store, memory.address) in (None, [None], WRONG, [WRONG])
    reasons(caplog, reason)
    assert store.is_exist("n") == 0 and torch.equal(store.get_tensor("t"), TENSOR)


HEADER = struct.Struct("<8s16sB39x8q")


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (b"quint8", (4,)),
        (b"qint8", (4,)),
        (b"quint4x2", (4,)),
        (b"int8", (2**32, 2**32)),
        (b"int8", (0, 2**62, 2**62)),
        (b"int8", (2**62 + 1, 4)),
        (b"int8", (-4,)),
        (b"nothing", (4,)),
        (b"float", (4,)),
    ],
)
def test_values_of_another_format(store, memory, caplog, dtype, shape):
    lengths = [*shape, *[0] * (8 - len(shape))]
    value = HEADER.pack(b"MKTENSOR", dtype, len(shape), *lengths) + b"1234"
    assert store.put("t", value) == 0
    assert store.get_tensor("t") is None
    reasons(caplog, "the value must be")
    assert store.get_tensor_into("t", memory.address, 4096) is None
    assert store.put_tensor_from("u", memory.address, len(value)) == WRONG
    assert store.put_tensor_with_tp_from("u", memory.address, len(value), 0, 2) == WRONG


def test_put_tensor_from_rejects_a_wrong_size(store, memory, caplog):
    assert store.put_tensor("t", TENSOR) == 0
    assert store.get_tensor_into("t", memory.address, 4096) is not None
    assert store.put_tensor_from("n", memory.address, 4096) == WRONG
    reasons(caplog, "the value must be .* got 4096 bytes")


def test_shards(store, memory):
    p = memory.address
    assert store.put_tensor("t", TENSOR) == 0
    size = store.get_size("t")
    assert store.get_tensor_into("t", p, size) is not None
    assert store.put_tensor_with_tp_from("s", p, size, tp_size=2, split_dim=1) == 0
    for rank, shard in enumerate(TENSOR.chunk(2, 1)):
        assert torch.equal(store.get_tensor_with_tp("s", rank, 2), shard)
        into = store.get_tensor_with_tp_into("s", p + 8192, 4096, rank, 2)
        assert torch.equal(into, shard)
    assert store.batch_put_tensor_with_tp_from(["u", "v"], [p, p], [size, 5], 0, 2) == [0, WRONG]
    u, none = store.batch_get_tensor_with_tp_into(
        ["u", "v"], [p + 8192, p], [4096, 4096], tp_rank=1, tp_size=2
    )
    assert torch.equal(u, TENSOR[2:]) and none is None
    assert store.put_tensor_with_tp_from("w", p, size) == 0  # whole
    assert torch.equal(store.get_tensor_with_tp_into("w", p + 8192, 4096), TENSOR)


def test_put_with_a_replicate_config(store):
    config = ReplicateConfig(with_hard_pin=True)
    assert store.pub_tensor("a", TENSOR, config) == 0
    assert store.batch_pub_tensor(["b", "c"], [TENSOR, OTHER], config) == [0, 0]
    assert store.pub_tensor_with_tp("d", TENSOR, config, 0, 2, 1) == 0
    assert store.batch_pub_tensor_with_tp(["e"], [TENSOR], config, tp_size=2) == [0]
    assert store.upsert_pub_tensor("a", OTHER, config) == 0
    assert store.batch_upsert_pub_tensor(["b", "f"], [OTHER, TENSOR], config) == [0, 0]
    keys = ["a", "b", "c", "d_tp_0", "d_tp_1", "e_tp_0", "e_tp_1", "f"]
    for i in range(300):  # more than there is room for: what is pinned stays
        assert store.put(f"n{i}", bytes(1 << 20)) == 0
    assert store.batch_is_exist(keys) == [1] * len(keys) and store.is_exist("n0") == 0
    assert torch.equal(store.get_tensor("a"), OTHER) and torch.equal(store.get_tensor("b"), OTHER)
    assert store.batch_upsert_tensor(["c", "g"], [TENSOR, OTHER]) == [0, 0]
    assert torch.equal(store.get_tensor("c"), TENSOR) and torch.equal(store.get_tensor("g"), OTHER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_get_into_a_tensor(store, dtype):
    """On a GPU: tests/store/gpu."""
    tensor = TENSOR.to(dtype)
    assert store.put_tensor("t", tensor) == 0
    into = torch.zeros(6, 6, dtype=dtype)
    assert store.get_tensor_into_cuda("t", into[1:5]) == tensor.nbytes
    assert torch.equal(into[1:5], tensor)
    assert not into[0].any() and not into[5].any()
    assert store.put_tensor("e", torch.empty(0, 3)) == 0
    empty, again = torch.empty(0, 3), torch.zeros(4, 6, dtype=dtype)
    batch = ["e", "none", "t", "t"], [empty, into, again, into]
    assert store.batch_get_tensor_into_cuda(*batch) == [0, OBJECT_NOT_FOUND, tensor.nbytes, WRONG]
    assert torch.equal(again, tensor)
    assert store.batch_get_tensor_into_cuda([], []) == []
    assert store.batch_get_tensor_into_cuda(["t", "t"], [again]) == [WRONG, WRONG]


@pytest.mark.parametrize(
    ("into", "reason"),
    [
        (torch.zeros(6, 4), r"tensor must be \[4, 6\] of torch.float32, got \[6, 4\]"),
        (torch.zeros(24), "got .24. of torch.float32"),
        (torch.zeros(4, 6).int(), "got .4, 6. of torch.int32"),
        (torch.zeros(4, 12)[:, ::2], "must be packed"),
        (np.zeros((4, 6), np.float32), "got .4, 6. of float32"),
        (bytes(96), "tensor must be writable"),
        (bytearray(96), "of None"),
        (5, "must be a torch tensor"),
        (torch.zeros(4, 6, device="meta"), "must be on cpu or cuda"),
    ],
)
def test_into_a_tensor_of_another_kind(store, caplog, into, reason):
    assert store.put_tensor("t", TENSOR) == 0 and store.put("bytes", b"abc") == 0
    assert store.put("long", bytes(500)) == 0
    assert store.get_tensor_into_cuda("t", into) == WRONG
    reasons(caplog, reason)
    for key in ("bytes", "long", 5):
        assert store.get_tensor_into_cuda(key, torch.zeros(4, 6)) == WRONG
        reasons(caplog, "within the value's 3 bytes|must be one of put_tensor|key must be a string")


def test_put_from_with_metadata(store, memory, caplog):
    p = memory.address
    assert store.put_from_with_metadata("m", p, p + 1000, 500, 16) == 0
    assert store.get("m") == memory.at(1000, 16) + memory.at(0, 500)
    assert store.put_from_with_metadata("n", p, 0, 500, 16) == WRONG
    reasons(caplog, "must be memory of this process")


def test_setup_dummy_uses_an_existing_pool(store, path, caplog):
    assert store.put("a", b"value") == 0
    dummy = MooncakeDistributedStore()
    assert dummy.setup_dummy(1 << 20, 1 << 20, path) == 0
    assert dummy.get("a") == b"value" and dummy.put("b", b"other") == 0
    assert store.get("b") == b"other" and dummy.health_check() == 0
    assert dummy.close() == 0
    assert dummy.setup_dummy(1 << 20, 1 << 20, path + "-none") == WRONG
    reasons(caplog, "global_segment_size must be above 0")
    assert dummy.setup_dummy(1 << 20, 1 << 20, "127.0.0.1:1") == -900
    reasons(caplog, "master_server_addr must be where .* runs")
    assert dummy.setup_dummy(1 << 20, -1, path) == WRONG
    reasons(caplog, "local_buffer_size must not be negative")
