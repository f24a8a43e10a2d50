"""Tensors of ``MooncakeDistributedStore`` distributed over ranks, against torch's own slices."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mooncake_serving.compat.mooncake.store import (
    INVALID_PARAMS,
    NO_AVAILABLE_HANDLE,
    ParallelAxis,
    ReadTarget,
    ReplicateConfig,
    TensorParallelism,
)

from .store_support import reasons

WRONG = INVALID_PARAMS
TENSOR = torch.arange(8 * 12 * 4.0).reshape(8, 12, 4)
LAYOUTS = list(itertools.product((1, 2, 4), (0, 1, 2)))
FULL = ReadTarget("full")


def tp(rank, size, split_dim=0):
    return TensorParallelism([ParallelAxis("tp", rank, size, split_dim)])


def tp_dp(rank, size, split_dim=0, dp_rank=0):
    axes = [ParallelAxis("tp", rank, size, split_dim), ParallelAxis("dp", dp_rank, 2)]
    return TensorParallelism(axes)


def partition(rank, size, split_dim=0):
    return SimpleNamespace(rank=rank, size=size, split_dim=split_dim)


def shard(parallelism):
    return ReadTarget("shard", parallelism)


def in_memory(store, memory, tensor):
    """Where a tensor is in memory, and how large it is there."""
    assert store.upsert_tensor("in memory", tensor) == 0
    size = store.get_size("in memory")
    assert store.get_tensor_into("in memory", memory.address, size) is not None
    return memory.address, size


def write_shards(store, memory, size, split_dim):
    parts = TENSOR.chunk(size, split_dim)
    for rank, part in enumerate(parts):
        assert store.put_tensor_with_parallelism("k", part, tp(rank, size, split_dim)) == 0


def write_partitions(store, memory, size, split_dim):
    for rank in range(size):
        place = partition(rank, size, split_dim)
        assert store.put_tensor_with_parallelism("k", TENSOR, writer_partition=place) == 0


def write_partitions_from_memory(store, memory, size, split_dim):
    p, num_bytes = in_memory(store, memory, TENSOR)
    batch = ["k"] * size, [p] * size, [num_bytes] * size
    places = [partition(rank, size, split_dim) for rank in range(size)]
    put = store.batch_put_tensor_with_parallelism_from
    assert put(*batch, writer_partitions=places) == [0] * size


def write_from_memory(store, memory, size, split_dim):
    put = store.put_tensor_with_parallelism_from
    assert put("k", *in_memory(store, memory, TENSOR), tp(0, size, split_dim)) == 0


def write_with_tp(store, memory, size, split_dim):
    assert store.put_tensor_with_tp("k", TENSOR, 0, size, split_dim) == 0


def write_whole(store, memory, size, split_dim):
    assert store.put_tensor_with_parallelism("k", TENSOR) == 0


WRITERS = [
    write_shards,
    write_partitions,
    write_partitions_from_memory,
    write_from_memory,
    write_with_tp,
    write_whole,
]


@pytest.mark.parametrize("write", WRITERS)
def test_every_layout_is_read_by_every_layout(store, memory, write):
    for layout in LAYOUTS:
        write(store, memory, *layout)
        assert torch.equal(store.get_tensor_with_parallelism("k", FULL), TENSOR)
        for size, split_dim in LAYOUTS:
            for rank, part in enumerate(TENSOR.chunk(size, split_dim)):
                target = shard(tp(rank, size, split_dim))
                got = store.get_tensor_with_parallelism("k", target)
                assert torch.equal(got, part), (layout, size, split_dim, rank)
                p, room = memory.address + 64, 128 + part.nbytes
                memory.bytes[:] = 7
                into = store.get_tensor_with_parallelism_into("k", p, room, target)
                assert into.data_ptr() == p + 128 and torch.equal(into, part)
                assert (memory.bytes[:64] == 7).all() and (memory.bytes[64 + room :] == 7).all()
        store.remove_all(True)


def test_with_other_axes(store, memory):
    for size, split_dim in LAYOUTS:
        for rank in range(size):
            where = tp_dp(rank, size, split_dim)
            assert store.put_tensor_with_parallelism("k", TENSOR, where) == 0
        whole = in_memory(store, memory, -TENSOR)
        where = tp_dp(0, size, split_dim, dp_rank=1)
        assert store.put_tensor_with_parallelism_from("k", *whole, where) == 0
        for dp_rank, tensor in enumerate((TENSOR, -TENSOR)):
            for other_size, other_dim in LAYOUTS:
                for rank, part in enumerate(tensor.chunk(other_size, other_dim)):
                    target = shard(tp_dp(rank, other_size, other_dim, dp_rank))
                    got = store.get_tensor_with_parallelism("k", target)
                    assert torch.equal(got, part)
            target = ReadTarget("full", tp_dp(0, 3, 1, dp_rank))
            assert torch.equal(store.get_tensor_with_parallelism("k", target), tensor)
        assert store.get_tensor_with_parallelism("k", FULL) is None
        assert store.get_tensor_with_parallelism("k", shard(tp(0, 2))) is None
        store.remove_all(True)


def test_layouts_without_a_tp_axis(store, memory, caplog):
    axes = [
        ParallelAxis("PP", 1, 4, stage_id=7),
        ParallelAxis("ep", 0, 2, expert_id=3),
        ParallelAxis("dp", 1, 2),
    ]
    everywhere = TensorParallelism(axes)
    assert store.put_tensor_with_parallelism("k", TENSOR, everywhere) == 0
    assert store.batch_is_exist(["k__dp_1of2__ep_0of2_eid3__pp_1of4_sid7", "k"]) == [1, 0]
    for mode in ("shard", "FULL"):
        got = store.get_tensor_with_parallelism("k", ReadTarget(mode, everywhere))
        assert torch.equal(got, TENSOR)
    axes[1].expert_id = 4
    assert store.get_tensor_with_parallelism("k", shard(everywhere)) is None
    assert not caplog.records  # it is only missing


def test_names_of_shards(store):
    write_shards(store, None, 2, 0)
    assert store.put_tensor_with_parallelism("k", TENSOR, tp_dp(1, 2)) == 0
    names = ["k", "k_tp_0", "k_tp_1", "k__dp_0of2_tp_1"]
    assert store.batch_is_exist(names) == [0, 1, 1, 1]
    assert torch.equal(store.get_tensor_with_tp("k", 1, 2), TENSOR[4:])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.complex64]
)
def test_dtypes(store, dtype):
    tensor = (TENSOR % 2).to(dtype)
    for rank, part in enumerate(tensor.chunk(4, 1)):
        assert store.put_tensor_with_parallelism("k", part, tp(rank, 4, 1)) == 0
    got = store.get_tensor_with_parallelism("k", shard(tp(1, 2, 2)))
    assert got.dtype == dtype
    assert torch.equal(got.view(torch.uint8), tensor[:, :, 2:].contiguous().view(torch.uint8))


def test_tensors_without_elements(store):
    for rank in range(2):
        assert store.put_tensor_with_parallelism("k", torch.empty(0, 4), tp(rank, 2, 1)) == 0
    assert store.get_tensor_with_parallelism("k", FULL).shape == (0, 8)
    assert store.get_tensor_with_parallelism("k", shard(tp(1, 4, 1))).shape == (0, 2)
    assert store.get_tensor_with_parallelism("k", shard(tp(1, 4, 0))).shape == (0, 8)


def test_upsert_with_another_layout(store, memory):
    write_shards(store, memory, 4, 0)
    for rank, part in enumerate((-TENSOR).chunk(2, 1)):
        assert store.put_tensor_with_parallelism("k", part, tp(rank, 2, 1)) == 0  # no effect
    assert torch.equal(store.get_tensor_with_parallelism("k", FULL), TENSOR)
    for rank, part in enumerate((-TENSOR).chunk(2, 1)):
        assert store.upsert_tensor_with_parallelism("k", part, tp(rank, 2, 1)) == 0
    assert torch.equal(store.get_tensor_with_parallelism("k", FULL), -TENSOR)
    p, size = in_memory(store, memory, TENSOR)
    upsert = store.upsert_tensor_with_parallelism_from
    assert upsert("k", p, size, tp(0, 3, 1)) == 0
    assert torch.equal(store.get_tensor_with_parallelism("k", FULL), TENSOR)
    assert store.batch_upsert_tensor_with_parallelism_from(["k"], [p], [size], [tp(0, 1)]) == [0]
    assert torch.equal(store.get_tensor_with_parallelism("k", shard(tp(1, 2))), TENSOR[4:])
    assert store.batch_upsert_tensor_with_parallelism(["k"], [-TENSOR], [tp(0, 1)]) == [0]
    assert torch.equal(store.get_tensor_with_parallelism("k", FULL), -TENSOR)


def test_missing_and_foreign_shards_return_none(store, memory, caplog):
    write_shards(store, memory, 4, 0)
    assert store.remove("k_tp_2", True) == 0
    assert torch.equal(store.get_tensor_with_parallelism("k", shard(tp(0, 2))), TENSOR[:4])
    assert store.get_tensor_with_parallelism("k", shard(tp(1, 2))) is None
    reasons(caplog, r"shards \[2\] of 'k' are missing")
    others = [
        (TENSOR[:4], tp(2, 4)),
        (TENSOR[4:6], tp(2, 3)),
        (TENSOR[4:6].int(), tp(2, 4)),
    ]
    for part, where in others:
        assert store.upsert_tensor_with_parallelism("k", part, where) == 0
        assert store.get_tensor_with_parallelism("k", FULL) is None
        reasons(caplog, "of different tensors")
    size = store.get_size("k_tp_1")
    assert store.get_into("k_tp_1", memory.address, size) == size
    assert store.upsert_tensor_from("k_tp_2", memory.address, size) == 0
    assert store.get_tensor_with_parallelism("k", FULL) is None
    reasons(caplog, r"shards \[2\] of 'k' are missing")  # it is number 1 again
    assert store.upsert_tensor("k_tp_0", TENSOR) == 0
    assert store.get_tensor_with_parallelism("k", FULL) is None
    reasons(caplog, "must be a shard of a tensor, got a whole one")
    assert torch.equal(store.get_tensor_with_parallelism("k", shard(tp(3, 4))), TENSOR[6:])


def test_get_into_too_little_memory_is_rejected(store, memory, caplog):
    write_shards(store, memory, 2, 0)
    before = memory.bytes.copy()
    room = 128 + TENSOR.nbytes - 1
    assert store.get_tensor_with_parallelism_into("k", memory.address, room, FULL) is None
    reasons(caplog, f"size must be at least the value's {room + 1} bytes, got {room}")
    assert store.get_tensor_with_parallelism_into("k", memory.address, 0, FULL) is None
    np.testing.assert_array_equal(memory.bytes, before)


def test_get_into_memory_and_put_from_it(store, memory):
    """What was read into memory is a tensor of its own there."""
    write_shards(store, memory, 4, 1)
    target = shard(tp(1, 2, 0))
    p, size = memory.address, 128 + TENSOR.nbytes // 2
    assert store.get_tensor_with_parallelism_into("k", p, 1 << 16, target) is not None
    assert store.put_tensor_from("a", p, size) == 0
    assert torch.equal(store.get_tensor("a"), TENSOR[4:])
    assert torch.equal(store.get_tensor_with_parallelism("a", shard(tp(0, 4))), TENSOR[4:5])
    assert store.put_tensor_with_parallelism_from("b", p, size, tp(0, 2, 2)) == 0
    assert torch.equal(store.get_tensor_with_parallelism("b", FULL), TENSOR[4:])


def test_batches(store, memory, caplog):
    halves = TENSOR.chunk(2)
    put = store.batch_put_tensor_with_parallelism
    assert put(["a", "a", "b"], [*halves, TENSOR], [tp(0, 2), tp(1, 2), None]) == [0, 0, 0]
    assert put(["c", "d"], [TENSOR, TENSOR], [tp(0, 1), tp(3, 2)]) == [0, WRONG]
    reasons(caplog, "rank of a tp axis must be below its size")
    assert put(["e", "f"], [TENSOR, -TENSOR]) == [0, 0]
    get = store.batch_get_tensor_with_parallelism
    got = get(["a", "none", "b", "a"], [FULL, FULL, None, shard(tp(1, 4))])
    assert got[1] is None and not caplog.records
    for one, expected in zip(got[:1] + got[2:], (TENSOR, TENSOR, TENSOR[2:4]), strict=True):
        assert torch.equal(one, expected)
    e, none = get(["e", "none"])
    assert torch.equal(e, TENSOR) and none is None
    p, room = memory.address, 128 + TENSOR.nbytes
    into = store.batch_get_tensor_with_parallelism_into
    a, b, c = into(["a", "none", "a"], [p, p, p + 8192], [room] * 3, [FULL, FULL, shard(tp(1, 2))])
    assert torch.equal(a, TENSOR) and b is None and torch.equal(c, TENSOR[4:])
    [b] = into(["b"], [p], [room])
    assert torch.equal(b, TENSOR) and b.data_ptr() == p + 128
    both = {"writer_partitions": [partition(0, 2)], "parallelisms": [tp(0, 2)]}
    assert put(["n"], [TENSOR], **both) == [WRONG]
    reasons(caplog, "parallelisms or writer_partitions must be None")
    for lists in ([TENSOR], [tp(0, 2)]), ([TENSOR] * 2, [tp(0, 2)]), ([TENSOR] * 2, tp(0, 2)):
        assert put(["n", "m"], *lists) == [WRONG, WRONG]
        reasons(caplog, "must be as long as keys|must be a list")
    assert get(["a", "b"], [FULL]) == into(["a", "b"], [p], [8]) == [None, None]
    reasons(caplog, "must be as long as keys")
    assert get("ab", [FULL]) == into("ab", [p], [8]) == [None] and put(5, []) == [WRONG]
    assert put([], [], []) == get([], []) == into([], [], []) == []


def test_put_with_a_replicate_config(store, caplog):
    config = ReplicateConfig(with_hard_pin=True)
    for rank, part in enumerate(TENSOR.chunk(2)):
        assert store.put_tensor_with_parallelism("k", part, tp(rank, 2), config) == 0
    for i in range(100):  # more than there is room for
        assert store.put(f"n{i}", bytes(1 << 20)) == 0
    assert torch.equal(store.get_tensor_with_parallelism("k", FULL), TENSOR)
    large = torch.zeros(80 << 20, dtype=torch.uint8)
    assert store.put_tensor_with_parallelism("l", large, tp(0, 2)) == NO_AVAILABLE_HANDLE
    assert store.put_tensor_with_parallelism("k", TENSOR, None, 5) == WRONG
    reasons(caplog, "config must be a ReplicateConfig")


NO_NUMBER = TensorParallelism([ParallelAxis("tp", "a", 2, 0)])


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        (tp(2, 2), "rank of a tp axis must be below its size"),
        (tp(-1, 2), "rank of a tp axis must be an integer from 0"),
        (tp(0, 0), "size of a tp axis must be an integer from 1"),
        (tp(0, 1 << 17), "at most 65536"),
        (tp(0, 2, None), "split_dim of a tp axis must be an integer"),
        (tp(0, 2, 3), "split_dim must be an axis of the tensor's 3"),
        (tp(0, 2, -1), "split_dim of a tp axis must be an integer"),
        (tp_dp(0, 2, 3), "split_dim must be an axis of the tensor's 3"),
        (tp_dp(0, 5), "tp_size must divide axis 0"),
        (NO_NUMBER, "rank of a tp axis must be an integer"),
        (TensorParallelism(), "must have axes, one of each kind"),
        (TensorParallelism(tp(0, 2).axes * 2), "must have axes, one of each kind"),
        (TensorParallelism([5]), "an axis must have kind"),
        (TensorParallelism(5), "parallelism.axes must be a list"),
        (TensorParallelism([ParallelAxis("xp", 0, 2)]), "must be tp, dp, ep or pp, got 'xp'"),
        (TensorParallelism([ParallelAxis(5, 0, 2)]), "must be tp, dp, ep or pp, got 5"),
        (TensorParallelism([ParallelAxis("dp", 0, 2, 0)]), "split_dim must be None on a dp axis"),
        (TensorParallelism([ParallelAxis("ep", 0, 2)]), "expert_id of a ep axis must be"),
        (TensorParallelism([ParallelAxis("pp", 0, 2)]), "stage_id of a pp axis must be"),
        (5, "parallelism must have axes"),
    ],
)
def test_wrong_layouts(store, memory, caplog, where, reason):
    write_shards(store, memory, 2, 0)
    assert store.put_tensor_with_parallelism("n", TENSOR, where) == WRONG
    reasons(caplog, reason)
    p, size = in_memory(store, memory, TENSOR)
    assert store.upsert_tensor_with_parallelism_from("n", p, size, where) == WRONG
    assert store.batch_put_tensor_with_parallelism(["n"], [TENSOR], [where]) == [WRONG]
    for mode in ("shard", "full"):
        target = ReadTarget(mode, where)
        found = store.get_tensor_with_parallelism("k", target)
        assert found is None or (mode == "full" and "split_dim must be an axis" in reason)
    assert [*store._running().backend.names()].count("n") == 0


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda s, p: s.put_tensor_with_parallelism("n", 5, tp(0, 2)), "must be a torch.Tensor"),
        (lambda s, p: s.put_tensor_with_parallelism(5, TENSOR, tp(0, 2)), "key must be a string"),
        (
            lambda s, p: s.put_tensor_with_parallelism("n", torch.tensor(1.0), tp(0, 2)),
            "split_dim must be an axis",
        ),
        (
            lambda s, p: s.put_tensor_with_parallelism(
                "n", TENSOR, tp(0, 2), None, partition(0, 2)
            ),
            "parallelism or writer_partition must be None",
        ),
        (
            lambda s, p: s.put_tensor_with_parallelism("n", TENSOR, None, None, {"rank": 0}),
            "writer_partition must have rank, size, split_dim",
        ),
        (
            lambda s, p: s.put_tensor_with_parallelism("n", TENSOR, None, None, partition(0, 5)),
            "tp_size must divide axis 0",
        ),
        (lambda s, p: s.put_tensor_with_parallelism_from("n", p, 100, tp(0, 2)), "of put_tensor"),
        (lambda s, p: s.put_tensor_with_parallelism_from("n", 0, 100), "memory of this process"),
        (lambda s, p: s.get_tensor_with_parallelism("k", 5), "target must have mode, parallelism"),
        (lambda s, p: s.get_tensor_with_parallelism("k", tp(0, 2)), "target must have mode"),
        (lambda s, p: s.get_tensor_with_parallelism("k", ReadTarget("x")), "target.mode must be"),
        (lambda s, p: s.get_tensor_with_parallelism("k", ReadTarget(5)), "target.mode must be"),
        (
            lambda s, p: s.get_tensor_with_parallelism("k", ReadTarget("shard")),
            "target.parallelism must be None for as_stored and given for shard",
        ),
        (
            lambda s, p: s.get_tensor_with_parallelism("k", ReadTarget("as_stored", tp(0, 2))),
            "target.parallelism must be None for as_stored",
        ),
        (
            lambda s, p: s.get_tensor_with_parallelism("k", shard(tp(0, 3))),
            "size 3 must divide axis 0",
        ),
        (lambda s, p: s.get_tensor_with_parallelism("k", shard(tp(0, 2, 3))), "must divide axis 3"),
        (lambda s, p: s.get_tensor_with_parallelism("bytes", FULL), "must be one of put_tensor"),
        (lambda s, p: s.get_tensor_with_parallelism(5), "key must be a string"),
        (lambda s, p: s.get_tensor_with_parallelism_into("k", 0, 9, FULL), "memory of this proc"),
        (lambda s, p: s.get_tensor_with_parallelism_into(5, p, 9, FULL), "key must be a string"),
    ],
)
def test_invalid_arguments(store, memory, caplog, call, reason):
    write_shards(store, memory, 2, 0)
    assert store.put("bytes", b"abc") == 0
    assert call(store, memory.address) in (None, WRONG)
    reasons(caplog, reason)
    assert sorted(store._running().backend.names()) == ["bytes", "k_tp_0", "k_tp_1"]


def test_damaged_header_never_yields_a_wrong_tensor(store, memory, caplog):
    """Whatever a header says, it is no more than a tensor that cannot be read."""
    write_shards(store, memory, 2, 0)
    size = store.get_size("k_tp_0")
    assert store.get_into("k_tp_0", memory.address, size) == size
    for offset, byte in itertools.product(range(128), (0, 1, 2, 7, 127, 255)):
        old = memory.bytes[offset]
        memory.bytes[offset] = byte
        assert store.upsert_from("k_tp_0", memory.address, size) == 0
        for target in (FULL, shard(tp(0, 2)), shard(tp(3, 4, 1))):
            got = store.get_tensor_with_parallelism("k", target)
            assert got is None or got.numel() <= TENSOR.numel()
        memory.bytes[offset] = old
