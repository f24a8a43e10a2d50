"""Lengths and positions of a batch, and refusals."""

import numpy as np
import pytest
import torch

import mooncake_kernels as mk


def test_queries_are_the_last_tokens_of_each_request() -> None:
    batch = mk.ChunkBatch([3, 0, 1], [5, 4, 1])
    assert batch.cu_q.tolist() == [0, 3, 3, 4]
    assert batch.request_of().tolist() == [0, 0, 0, 2]
    assert batch.query_positions().tolist() == [2, 3, 4, 0]


def test_explicit_positions_are_kept() -> None:
    batch = mk.ChunkBatch([2, 1], [9, 7], positions=torch.tensor([8, 1, 0]))
    assert batch.query_positions().tolist() == [8, 1, 0]


def as_tensor(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def as_numpy(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("made", [as_tensor, as_numpy])
def test_batch_owns_copies_of_its_lengths(made) -> None:
    lengths = [made([4, 4]), made([8, 8]), made([*range(8)])]
    batch = mk.ChunkBatch(*lengths)
    mk.mask.MaskBuilder(mk.mask.causal(), batch).set_lengths([1, 2], [3, 4], [0, 1, 2])
    assert [each.tolist() for each in lengths] == [[4, 4], [8, 8], [*range(8)]]
    lengths[1][:] = 0
    assert batch.kv_lens.tolist() == [3, 4]


def test_an_empty_batch() -> None:
    batch = mk.ChunkBatch([], [])
    assert (batch.num_requests, batch.num_q) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64])
def test_lengths_may_be_unsigned(dtype: torch.dtype) -> None:
    batch = mk.ChunkBatch(torch.tensor([1, 2], dtype=dtype), torch.tensor([3, 200], dtype=dtype))
    assert batch.q_lens.tolist() == [1, 2] and batch.kv_lens.tolist() == [3, 200]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([2], [1]), r"kv_lens\[0\] must be at least q_lens\[0\] \(2\), got 1"),
        (([-1], [1]), r"q_lens\[0\] must be >= 0, got -1"),
        (([1, 1], [1]), "one entry a request"),
        (([0.5], [1]), "q_lens must be 1-d integers, got torch.float32"),
        (([1], [2**31]), "kv_lens must be below"),
        (([1], torch.tensor([2**31], dtype=torch.uint32)), "kv_lens must be below"),
        (([1], torch.tensor([2**64 - 1], dtype=torch.uint64)), "kv_lens must be below"),
        (([1], [2], [2]), r"positions\[0\] must be in \[0, 2\)"),
        (([1], [2], [0, 1]), r"one entry a query \(1\), got 2"),
    ],
)
def test_bad_lengths_are_rejected(arguments: tuple, words: str) -> None:
    with pytest.raises(mk.InvalidArgument, match=words):
        mk.ChunkBatch(*arguments)


def test_dense_matches_the_definition() -> None:
    batch = mk.ChunkBatch([2], [6])
    rows = mk.MaskRows(
        batch,
        intervals=torch.tensor([[0, 2, 4, 5], [0, 0, 0, 0]], dtype=torch.int32),
        tail_bits=torch.tensor([0b10, 0b11]),
        tail_base=torch.tensor([4], dtype=torch.int32),
    )
    (dense,) = rows.dense()
    assert dense.int().tolist() == [[1, 1, 0, 0, 1, 1], [0, 0, 0, 0, 1, 1]]


def test_torch_default_device_is_ignored():
    batch = mk.ChunkBatch([2, 1], [4, 3])
    rule = mk.mask.causal() | mk.mask.tree([-1])
    rows, bits = mk.mask.rows(rule, batch), mk.mask.packed(rule, batch)
    with torch.device("meta"):
        other = mk.ChunkBatch([2, 1], [4, 3])
        assert other.device.type == "cpu"
        assert torch.equal(mk.mask.rows(rule, other).intervals, rows.intervals)
        assert torch.equal(mk.mask.packed(rule, other).packed, bits.packed)
