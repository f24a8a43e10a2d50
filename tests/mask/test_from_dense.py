"""Rows from dense masks and packed bits: round trips, and errors for what rows cannot hold."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import mooncake_kernels as mk
from tests.mask.examples import EXAMPLES, SELECTED, dense_masks, equal


def same(left: mk.MaskRows, right: mk.MaskRows) -> bool:
    fields = ("intervals", "tail_bits", "tail_base")
    return all(torch.equal(getattr(left, f), getattr(right, f)) for f in fields)


def row_of(*runs: tuple[int, int], kv_len: int) -> torch.Tensor:
    row = torch.zeros(kv_len, dtype=torch.bool)
    for begin, end in runs:
        row[begin:end] = True
    return row


@pytest.mark.parametrize("name", EXAMPLES)
def test_dense_masks_round_trip_to_rows(name: str) -> None:
    rows = EXAMPLES[name]
    again = mk.mask.rows_from_dense(rows.dense(), rows.batch)
    if name == "tree":  # of which another tail_base may be as good
        assert equal(again.dense(), rows.dense())
    else:
        assert same(again, rows)


@given(masks=dense_masks())
@settings(max_examples=80, deadline=None)
def test_dense_masks_that_fit_round_trip(masks: list[torch.Tensor]) -> None:
    rows = mk.mask.rows_from_dense(masks)
    assert equal(rows.dense(), masks)
    lo0, hi0, lo1, hi1 = rows.intervals.unbind(1)
    assert bool(((hi0 > lo0) & (hi1 > lo1) & (hi0 < lo1) | (lo1 == 0) & (hi1 == 0)).all())
    assert same(mk.mask.rows_from_dense(rows.dense(), rows.batch), rows)


@given(masks=dense_masks())
@settings(max_examples=60, deadline=None)
def test_any_64_keys_can_be_the_tail(masks: list[torch.Tensor]) -> None:
    """With two runs before them, whatever a query sees of 64 keys is held."""
    for index, mask in enumerate(masks):
        wide = torch.nn.functional.pad(mask[:, -64:], (5, 0))
        wide[:, 0] = wide[:, 2] = True
        masks[index] = wide
    assert equal(mk.mask.rows_from_dense(masks).dense(), masks)


def test_tail_begins_at_the_first_query_if_possible() -> None:
    mask = torch.stack([row_of((0, 10), (11, 12), (13, 14), kv_len=16)] * 6)
    assert mk.mask.rows_from_dense([mask]).tail_base.tolist() == [10]
    assert mk.mask.rows_from_dense([mask[:1]]).tail_base.tolist() == [13]


def test_positions_are_kept() -> None:
    rows = EXAMPLES["selected"]
    assert mk.mask.rows_from_dense(rows.dense(), SELECTED).batch is SELECTED


def test_first_unfit_row_is_reported() -> None:
    fits = row_of((0, 1), (2, 3), (10, 12), kv_len=100)
    wide = row_of((0, 1), (2, 3), (10, 12), (90, 91), kv_len=100)
    late = row_of((0, 1), (2, 3), (80, 85), kv_len=100)
    with pytest.raises(
        mk.InvalidArgument, match=r"mask of request 1 must .* got row 2, whose third run"
    ):
        mk.mask.rows_from_dense([fits[None], torch.stack([fits, fits, wide, late])])
    with pytest.raises(mk.InvalidArgument, match=r"request 0 .*got row 1, .* is at 80"):
        mk.mask.rows_from_dense([torch.stack([fits, late, wide])])


@pytest.mark.parametrize(
    ("masks", "words"),
    [
        ([torch.ones(2, 3)], r"masks\[0\] must be bool of two dimensions, got torch.float32"),
        ([torch.ones(3, dtype=torch.bool)], r"masks\[0\] must be bool of two dimensions"),
        ([[[True]]], r"masks\[0\] must be a tensor"),
        ([torch.ones(3, 2, dtype=torch.bool)], r"kv_lens\[0\] must be at least q_lens\[0\]"),
    ],
)
def test_bad_masks_are_rejected(masks: list, words: str) -> None:
    with pytest.raises(mk.InvalidArgument, match=words):
        mk.mask.rows_from_dense(masks)


def test_masks_must_be_tensors_matching_the_batch() -> None:
    batch = mk.ChunkBatch([2], [4])
    for masks in (None, 5, iter(())):
        with pytest.raises(mk.InvalidArgument, match="masks must be a list of tensors, got"):
            mk.mask.rows_from_dense(masks, batch)
        with pytest.raises(mk.InvalidArgument, match="masks must be a list of tensors, got"):
            mk.mask.rows_from_dense(masks)
    with pytest.raises(mk.InvalidArgument, match=r"bool of shape \(2, 4\), got .* \(2, 3\)"):
        mk.mask.rows_from_dense([torch.ones(2, 3, dtype=torch.bool)], batch)
    with pytest.raises(mk.InvalidArgument, match=r"one a request \(1\), got 0"):
        mk.mask.rows_from_dense([], batch)


def numpy_packed(masks: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """FlashInfer's form, by numpy: each request's bits flattened and padded to a byte."""
    pieces = [np.packbits(mask.numpy().reshape(-1), bitorder="little") for mask in masks]
    packed = np.concatenate([np.zeros(0, np.uint8), *pieces])
    indptr = np.cumsum([0, *(len(piece) for piece in pieces)])
    return torch.from_numpy(packed), torch.from_numpy(indptr)


@pytest.mark.parametrize("name", EXAMPLES)
def test_packed_bits_round_trip_to_rows(name: str) -> None:
    rows = EXAMPLES[name]
    mask = rows.packed()
    assert all(map(torch.equal, mask, numpy_packed(rows.dense())))
    assert equal(mk.mask.rows_from_packed(mask, rows.batch).dense(), rows.dense())


def test_bad_packed_bits_are_rejected() -> None:
    batch = mk.ChunkBatch([2, 1], [4, 4])
    mask = mk.mask.PackedMask(torch.zeros(2, dtype=torch.uint8), torch.tensor([0, 1, 2]))
    assert mk.mask.rows_from_packed(mask, batch).intervals.sum() == 0
    for bad in (torch.tensor([0, 1]), torch.tensor([0, 8, 12]), torch.tensor([0, 2, 3])):
        with pytest.raises(mk.InvalidArgument, match="indptr must be the sums"):
            mk.mask.rows_from_packed(mask._replace(indptr=bad), batch)
    for bad in (mask._replace(indptr=None), mk.mask.PackedMask(None, None)):
        with pytest.raises(mk.InvalidArgument, match=r"mask\.\w+ must be a tensor, got None"):
            mk.mask.rows_from_packed(bad, batch)
    with pytest.raises(mk.InvalidArgument, match="within the 1 bytes of mask.packed"):
        mk.mask.rows_from_packed(mask._replace(packed=mask.packed[:1]), batch)
    with pytest.raises(mk.InvalidArgument, match="packed must be uint8"):
        mk.mask.rows_from_packed(mask._replace(packed=mask.packed.int()), batch)
