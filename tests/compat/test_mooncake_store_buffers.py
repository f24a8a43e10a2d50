"""The calls of ``MooncakeDistributedStore`` on memory by address, and on tensors."""

import contextlib
import mmap
import sys

import numpy as np
import pytest
import torch

from mooncake_kernels.pool import ObjectPool
from mooncake_serving.compat.mooncake.store import (
    CHECKSUM_MISMATCH,
    INVALID_PARAMS,
    OBJECT_NOT_FOUND,
)

from .store_support import pool_file, reasons, set_up

WRONG, ABSENT = INVALID_PARAMS, OBJECT_NOT_FOUND
KIB = 1024


def test_put_from_and_get_into(store, memory):
    for size in (1, 64, 1000, 64 * KIB):
        assert store.put_from(f"f{size}", memory.address + 7, size) == 0
        assert store.get(f"f{size}") == memory.at(7, size)
        assert store.get_into(f"f{size}", memory.address + 512 * KIB, size) == size
        assert memory.at(512 * KIB, size) == memory.at(7, size)


def test_sizes_of_destinations(store, memory):
    store.put_from("f", memory.address, 1000)
    beyond = memory.at(101_000, 1000)
    assert store.get_into("f", memory.address + 100_000, 2000) == 1000  # larger
    assert memory.at(101_000, 1000) == beyond
    assert store.get_into("f", memory.address + 100_000, 999) == WRONG
    assert store.get_into("f", memory.address, 0) == WRONG
    assert store.get_into("no", memory.address, 10) == ABSENT


def test_damaged_value_is_removed_and_not_read(store, memory, caplog):
    """In the pool of the host: it is removed, and nothing of it is read."""
    calls = [
        lambda: store.get_into("f", memory.address, 5000),
        lambda: store.batch_get_into(["f", "no"], [memory.address] * 2, [5000, 9])[0],
    ]
    for call in calls:
        memory.bytes[:5000] = np.arange(5000) % 251
        assert store.put_from("f", memory.address, 5000) == 0
        pool = store._running().backend._store.pool.memory().numpy()
        pool[pool.tobytes().index(memory.at(0, 2000)) + 4000] ^= 1
        caplog.clear()
        assert call() == CHECKSUM_MISMATCH and store.is_exist("f") == 0
        reasons(caplog, "not what its checksum says")
        assert not memory.bytes[:5000].any()


def test_empty_value_is_not_stored(store, memory):
    assert store.put_from("f", memory.address, 0) == 0 and store.is_exist("f") == 0
    assert store.batch_put_from(["f"], [memory.address], [0]) == [WRONG]
    codes = store.batch_put_from_multi_buffers(["m"], [[memory.address] * 2], [[0, 8]])
    assert codes == [0] and store.get_size("m") == 8


def test_registered_memory(store, memory, caplog):
    begin, size = memory.address, memory.bytes.nbytes
    for address, num_bytes in ((begin, size), (begin + 4096, 4096), (begin - 1, 2)):
        assert store.register_buffer(address, num_bytes) == WRONG
        reasons(caplog, "must not overlap|this process can read")
    for address, num_bytes in ((begin, 0), (0, 4096), (1 << 40, 4096), (-1, 8), ("a", 8)):
        assert store.register_buffer(address, num_bytes) == WRONG
    assert store.unregister_buffer(begin + 10) == WRONG
    reasons(caplog, "must be where a registered buffer begins")
    assert store.unregister_buffer(begin) == 0
    assert store.unregister_buffer(begin) == WRONG
    assert store.register_buffer(begin + 4096, 4096) == store.register_buffer(begin, 4096) == 0


def test_unregistered_memory_is_looked_up(store, memory, caplog):
    other = np.zeros(1000, np.uint8)
    assert store.put_from("f", memory.address, 1000) == 0
    assert store.get_into("f", other.ctypes.data, 1000) == 1000
    assert other.tobytes() == memory.at(0, 1000)
    assert store.put_from("g", other.ctypes.data, 1000) == 0
    for address in (0, 4096, 1 << 45):
        assert store.get_into("f", address, 1000) == store.put_from("h", address, 8) == WRONG
        reasons(caplog, "must be memory of this process that it can read, or of a GPU")
    assert store.is_exist("h") == 0


@pytest.mark.parametrize("call, most", [("put_from", 55), ("get_into", 40)])
def test_single_value_takes_few_python_calls(store, memory, call, most):
    """Each takes most of a microsecond where the caches are cold, as after a large copy."""
    count = 0

    def note(_, event, __):
        nonlocal count
        count += event in ("call", "c_call")

    move = getattr(store, call)
    assert store.put_from("get_into", memory.address, KIB) == 0
    sys.setprofile(note)
    try:
        code = move(call, memory.address, KIB)
    finally:
        sys.setprofile(None)
    assert code == {"put_from": 0, "get_into": KIB}[call]
    assert count <= most


def test_read_only_memory_is_only_read(store):
    pages = mmap.mmap(-1, 4096, prot=mmap.PROT_READ)
    address = np.frombuffer(pages, np.uint8).ctypes.data
    assert store.register_buffer(address, 4096) == 0
    assert store.put_from("z", address, 4096) == 0 and store.get("z") == bytes(4096)
    assert store.get_into("z", address, 4096) == WRONG


def test_batches(store, memory):
    p = memory.address
    keys, pointers, sizes = ["a", "b", "c"], [p, p + 100, p + 200], [100, 100, 50]
    assert store.batch_put_from(keys, pointers, sizes) == [0, 0, 0]
    assert store.batch_put_from(["a", "d"], [p, p], [5, 5]) == [0, 0]
    targets = [p + 4 * KIB, p + 5 * KIB, p + 6 * KIB, p + 7 * KIB]
    codes = store.batch_get_into(["a", "no", "b", "c"], targets, [100, 9, 40, 60])
    assert codes == [100, ABSENT, WRONG, 50]
    assert memory.at(4 * KIB, 100) == memory.at(0, 100)
    assert memory.at(7 * KIB, 50) == memory.at(200, 50)
    assert store.batch_upsert_from(["a", "c"], [p, p], [7, 8]) == [0, 0]
    assert (store.get_size("a"), store.get_size("c")) == (7, 8)
    assert store.upsert_from("a", p, 9) == 0 and store.get_size("a") == 9
    assert store.batch_put_from([], [], []) == store.batch_get_into([], [], []) == []


def test_lists_of_different_lengths_are_rejected(store, memory, caplog):
    p = memory.address
    assert store.batch_put_from(["x", "y"], [p], [8, 8]) == [WRONG, WRONG]
    assert store.batch_get_into(["x"], [p, p], [8, 8]) == [WRONG]
    assert store.batch_put_from_multi_buffers(["x"], [[p, p]], [[8]]) == [WRONG]
    assert store.batch_put_from_multi_buffers(["x", "y"], [[p]], [[8]]) == [WRONG, WRONG]
    assert store.batch_put_from_multi_buffers(["x"], [[]], [[]]) == [WRONG]
    assert store.batch_get_into_multi_buffers(["x", "y"], [[p]], [[8]]) == [WRONG, WRONG]
    reasons(caplog, "as long as keys")
    assert store.remove_all() == 0


@pytest.mark.parametrize("wrong", [None, 5, "abc"])
def test_values_that_are_not_lists(store, memory, caplog, wrong):
    p = memory.address
    calls = [
        ([b""], lambda: store.get_batch(wrong)),
        ([None], lambda: store.batch_get_buffer(wrong)),
        ([None], lambda: store.batch_get_tensor(wrong)),
        ([-1], lambda: store.batch_is_exist(wrong)),
        ([WRONG], lambda: store.batch_remove(wrong)),
        ([WRONG], lambda: store.batch_put_tensor(wrong, [torch.zeros(1)] * 3)),
        ([WRONG], lambda: store.batch_put_tensor_with_tp(["a"], wrong)),
        (WRONG, lambda: store.put_batch(wrong, [b"1"] * 3)),
        ([WRONG], lambda: store.batch_put_from(wrong, [p] * 3, [8] * 3)),
        ([WRONG], lambda: store.batch_get_into(["a"], wrong, [8])),
        ([WRONG], lambda: store.batch_put_from_multi_buffers(["a"], [wrong], [[8]])),
        ([WRONG], lambda: store.batch_get_into_multi_buffers(["a"], [[p]], [wrong])),
        ([[[WRONG]]], lambda: store.get_into_ranges(wrong, [["a"]], [[[0]]], [[[0]]], [[[4]]])),
        ([[[WRONG]]], lambda: store.get_into_ranges([p], [["a"]], [wrong], [[[0]]], [[[4]]])),
    ]
    for answer, call in calls:
        assert call() == answer
        reasons(caplog, "must be a list, got")
    assert store.remove_all() == 0


def test_many_buffers(store, memory):
    p = memory.address
    pieces = [p + i * 3000 for i in range(64)]
    assert store.batch_put_from_multi_buffers(["m"], [pieces], [[1000] * 64]) == [0]
    whole = b"".join(memory.at(i * 3000, 1000) for i in range(64))
    assert store.get("m") == whole
    far = p + 512 * KIB
    targets = [far + i * 2000 for i in range(64)]
    codes = store.batch_get_into_multi_buffers(["m", "no"], [targets] * 2, [[1000] * 64] * 2)
    assert codes == [64_000, ABSENT]
    assert b"".join(memory.at(512 * KIB + i * 2000, 1000) for i in range(64)) == whole
    other_cut = store.batch_get_into_multi_buffers(["m"], [[far, far + 64 * KIB]], [[10, 64_000]])
    assert other_cut == [64_000]
    assert memory.at(512 * KIB, 10) + memory.at(576 * KIB, 63_990) == whole
    assert store.batch_get_into_multi_buffers(["m"], [[far]], [[50]]) == [WRONG]


def test_ranges(store, memory):
    p, far = memory.address, 512 * KIB
    store.put_from("f", p, 1000)
    store.put_from("g", p + 5000, 300)
    found = store.get_into_ranges(
        [p + far, p + far + 10_000],
        [["f", "g"], ["f"]],
        [[[0, 100], [200]], [[5]]],
        [[[10, 20], [0]], [[0]]],
        [[[10, 20], [300]], [[1000]]],
    )
    assert found == [[[10, 20], [300]], [[1000]]]
    assert memory.at(far, 10) == memory.at(10, 10)
    assert memory.at(far + 100, 20) == memory.at(20, 20)
    assert memory.at(far + 200, 300) == memory.at(5000, 300)
    assert memory.at(far + 10_005, 1000) == memory.at(0, 1000)


def test_checksum_is_verified_once_for_many_ranges(store, memory, monkeypatch):
    looks = []
    for name in ("get_into", "pin"):
        original = getattr(ObjectPool, name)

        def noted(*args, _name=name, _original=original, **kwargs):
            looks.append(_name)
            return _original(*args, **kwargs)

        monkeypatch.setattr(ObjectPool, name, noted)
    p, places = memory.address, list(range(0, 5000, 100))
    assert store.put_from("f", p, 5000) == 0
    to, sizes = [place + 20_000 for place in places], [100] * 50
    assert store.get_into_ranges([p], [["f"]], [[to]], [[places]], [[sizes]]) == [[sizes]]
    assert memory.at(20_000, 5000) == memory.at(0, 5000) and looks == ["pin"]
    pool = store._running().backend._store.pool.memory().numpy()
    pool[pool.tobytes().index(memory.at(0, 2000)) + 4000] ^= 1
    found = store.get_into_ranges([p], [["f"]], [[to]], [[places]], [[sizes]])
    assert found == [[[CHECKSUM_MISMATCH] * 50]] and store.is_exist("f") == 0


@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (([["f"]], [[[0]]], [[[990]]], [[[20]]]), [[[WRONG]]]),  # beyond the value
        (([["no"]], [[[0]]], [[[0]]], [[[20]]]), [[[ABSENT]]]),
        (([["f"]], [[[0, 1]]], [[[0]]], [[[20]]]), [[[WRONG, WRONG]]]),
        (([["no", "f"]], [[[0], [0, 9]]], [[[0], [0, 995]]], [[[9], [9, 9]]]),
         [[[ABSENT], [9, WRONG]]]),
        (([["f"]], [[[0]]], [[[0]]], [[[0]]]), [[[0]]]),
        (([["f"]], [[[-1]]], [[[0]]], [[[1]]]), [[[WRONG]]]),
        (([], [], [], []), [[[WRONG]]]),
    ],
)  # fmt: skip
def test_invalid_ranges_return_error_codes(store, memory, lists, expected):
    store.put_from("f", memory.address, 1000)
    assert store.get_into_ranges([memory.address + 4096], *lists) == expected


DTYPES = [
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool,
    torch.complex64,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_put_and_get_a_tensor(store, dtype):
    tensor = (torch.arange(24).reshape(2, 3, 4) % 2).to(dtype)
    assert store.put_tensor("t", tensor) == 0
    found = store.get_tensor("t")
    assert found.dtype == dtype and found.shape == tensor.shape
    assert bytes(found.contiguous().view(torch.uint8).numpy()) == bytes(
        tensor.view(torch.uint8).numpy()
    )
    found.zero_()  # a copy
    assert bool(store.get_tensor("t").view(torch.uint8).any())


@pytest.mark.parametrize("shape", [(), (0, 3), (1,) * 8, (5, 1, 7)])
def test_shapes(store, shape):
    tensor = torch.rand(shape)
    assert store.put_tensor("t", tensor) == 0
    assert torch.equal(store.get_tensor("t"), tensor)
    if len(shape) > 1:
        assert store.upsert_tensor("t", tensor.mT) == 0
        assert torch.equal(store.get_tensor("t"), tensor.mT)


def test_values_that_are_not_tensors(store, caplog):
    for value in (5, torch.rand((1,) * 9), torch.rand(2, device="meta")):
        assert store.put_tensor("t", value) == WRONG
    reasons(caplog, "tensor must be|tensor must have")
    quantized = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    for value in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), quantized):
        assert store.put_tensor("t", value) == WRONG
        reasons(caplog, "tensor must be dense and not quantized")
    for i, value in enumerate((b"abc", b"a" * 1000, b"MKTENSOR" + b"\xff" * 200)):
        store.put(f"v{i}", value)
        assert store.get_tensor(f"v{i}") is None
        reasons(caplog, "the value must be")
    assert store.put_tensor("t", torch.rand(8)) == 0
    store.put("short", store.get("t")[:-1])
    assert store.get_tensor("short") is None


def test_lazy_conjugates_and_negatives_are_materialized(store):
    lazy = torch.tensor([1 + 2j, 3 + 4j]).conj()
    for i, tensor in enumerate((lazy, lazy.imag, torch._neg_view(torch.ones(3)))):
        assert store.put_tensor(f"t{i}", tensor) == 0
        assert store.get_tensor(f"t{i}").tolist() == tensor.tolist()


def test_batches_of_tensors(store):
    tensors = [torch.rand(2), torch.rand(3)]
    assert store.batch_put_tensor(["a", "b"], tensors) == [0, 0]
    found = store.batch_get_tensor(["a", "no", "b"])
    assert torch.equal(found[0], tensors[0]) and found[1] is None
    assert torch.equal(found[2], tensors[1])
    assert store.batch_put_tensor(["c"], tensors) == [WRONG]
    assert store.pub_tensor("p", tensors[0]) == 0


def test_listing_names_does_not_count_as_a_use():
    with (
        pool_file() as path,
        contextlib.closing(set_up(path)) as store,
        ObjectPool.open(path) as pool,
    ):
        for i in range(8):
            assert store.put(f"k{i}", b"x") == 0
        assert store.get("k3") == b"x"
        before = pool.objects()
        assert store.remove_by_regex("nothing matches") == 0
        after = pool.objects()
        assert before.recency.tolist() == after.recency.tolist()
        assert before.uses.tolist() == after.uses.tolist()
        assert store.remove_by_regex("k[0-3]") == 4


def test_shards(store, caplog):
    tensor = torch.arange(8.0).reshape(2, 4)
    assert store.put_tensor_with_tp("t", tensor, 0, 2, 1) == 0
    assert store.batch_is_exist(["t", "t_tp_0", "t_tp_1"]) == [0, 1, 1]
    assert torch.equal(store.get_tensor_with_tp("t", 1, 2, 1), tensor[:, 2:])
    assert store.get_tensor_with_tp("t") is None
    assert store.put_tensor_with_tp("odd", torch.arange(5.0), 0, 2, 0) == WRONG
    reasons(caplog, "tp_size must divide axis 0")
    assert store.put_tensor_with_tp("odd", tensor, 0, 2, 2) == WRONG
    assert store.put_tensor_with_tp("one", tensor) == 0
    assert torch.equal(store.get_tensor_with_tp("one"), tensor)
    assert store.batch_put_tensor_with_tp(["x", "y"], [tensor, tensor], 0, 2) == [0, 0]
    for shard in store.batch_get_tensor_with_tp(["x", "y"], 1, 2):
        assert torch.equal(shard, tensor[1:])
    assert store.remove_by_regex("odd") == 0


def test_an_error_states_the_size_of_the_value(store, memory, caplog):
    """Without the name that is stored in front of it."""
    p = memory.address
    assert store.put("a", bytes(30)) == 0
    at_least = "size must be at least the value's 30 bytes, got"
    assert store.get_into("a", p, 10) == WRONG
    reasons(caplog, f"get_into: {at_least} 10$")
    assert store.batch_get_into(["a"], [p], [29]) == [WRONG]
    reasons(caplog, f"batch_get_into: {at_least} 29$")
    assert store.batch_get_into_multi_buffers(["a"], [[p, p + 50]], [[10, 15]]) == [WRONG]
    reasons(caplog, f"batch_get_into_multi_buffers: {at_least} 25$")
    assert store.get_into_ranges([p], [["a"]], [[[0]]], [[[29]]], [[[2]]]) == [[[WRONG]]]
    reasons(caplog, "must be within the value's 30 bytes, got 2 from 29$")
