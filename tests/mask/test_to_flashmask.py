"""FlashMask's columns against a decoder of their documented meaning, written as loops."""

import pytest
import torch
from hypothesis import given, settings

import mooncake_kernels as mk
from tests.mask.examples import EXAMPLES, dense_masks, equal


def decoded(columns: mk.mask.FlashMaskColumns, q_len: int) -> torch.Tensor:
    """Which queries see which keys: for each key, rows are struck out."""
    indices, causal = columns
    assert indices.dtype == torch.int32 and indices.shape[:2] == (1, 1)
    kv_len, num_columns = indices.shape[2:]
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    for key, numbers in enumerate(indices[0, 0].tolist()):
        begin, end = numbers[0], (numbers[1] if num_columns == (2 if causal else 4) else q_len)
        seen[begin:end, key] = False
        if causal:
            seen[: max(0, key - (kv_len - q_len)), key] = False
        elif num_columns == 2:
            seen[: numbers[1], key] = False
        else:
            seen[numbers[2] : numbers[3], key] = False
    return seen


FEWEST = {  # columns, and whether causal, of a whole prompt
    "causal": (1, True),
    "window": (1, True),
    "documents": (1, True),
    "chunked_local": (1, True),
    "full": (2, False),
    "both_ways": (2, False),
    "prefix_lm": (2, False),
    "spans": (2, False),
    "window_ahead": (2, False),
}


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "tree"])
def test_columns_match_the_rows(name: str) -> None:
    rows = EXAMPLES[name]
    columns = rows.to_flashmask()
    for one, seen in zip(columns, rows.dense(), strict=True):
        assert torch.equal(decoded(one, len(seen)), seen)
    if name in FEWEST:
        assert (columns[3].startend_row_indices.shape[3], columns[3].causal) == FEWEST[name]
    again = mk.mask.rows_from_flashmask(columns, rows.batch)
    assert equal(again.dense(), rows.dense())


def first_key_of_three_runs(masks: list[torch.Tensor]) -> tuple[int, int] | None:
    for request, mask in enumerate(masks):
        for key, column in enumerate(mask.T.tolist()):
            masked_runs = "".join("x" if seen else "-" for seen in column).split("x")
            if sum(map(bool, masked_runs)) > 2:
                return request, key
    return None


@given(masks=dense_masks())
@settings(max_examples=50, deadline=None)
def test_random_masks_convert_or_are_rejected(masks: list[torch.Tensor]) -> None:
    """Exact, or a key of three masked runs, which is named."""
    rows = mk.mask.rows_from_dense(masks)
    bad = first_key_of_three_runs(masks)
    if bad is not None:
        with pytest.raises(mk.InvalidArgument, match=f"got key {bad[1]} of request {bad[0]},"):
            rows.to_flashmask()
        return
    for one, mask in zip(rows.to_flashmask(), masks, strict=True):
        assert torch.equal(decoded(one, len(mask)), mask)


def test_key_with_three_masked_runs_is_rejected() -> None:
    with pytest.raises(mk.InvalidArgument, match="got key 15 of request 0, which 3 runs do not"):
        EXAMPLES["tree"].to_flashmask()  # draft 1: seen by itself and a child, not before or after
    mask = torch.ones(6, 8, dtype=torch.bool)
    mask[::2, 3] = mask[::2, 5] = False
    with pytest.raises(mk.InvalidArgument, match="got key 3 of request 1, which 3 runs do not"):
        mk.mask.rows_from_dense([mask[:1], mask]).to_flashmask()


def test_bad_columns_are_rejected() -> None:
    batch = mk.ChunkBatch([2], [4])
    column = torch.zeros(1, 1, 4, 1, dtype=torch.int32)
    with pytest.raises(mk.InvalidArgument, match=r"columns\[0\] must be of shape \(1, 1, 4, 2\)"):
        mk.mask.rows_from_flashmask([mk.mask.FlashMaskColumns(column, False)], batch)
    with pytest.raises(mk.InvalidArgument, match=r"one a request \(1\), got 2"):
        mk.mask.rows_from_flashmask([mk.mask.FlashMaskColumns(column, True)] * 2, batch)
    for columns, words in [
        (3, "columns must be a list, one a request, got 3"),
        ([3], r"columns\[0\] must be FlashMaskColumns, got 3"),
        ([(column,)], r"columns\[0\] must be FlashMaskColumns, got \(tensor"),
        ([(1, True)], r"columns\[0\].startend_row_indices must be a tensor, got 1"),
        ([(column.float(), True)], r"startend_row_indices must be int32, got torch.float32"),
        ([(column.long(), True)], r"startend_row_indices must be int32, got torch.int64"),
        ([(column, 2)], r"columns\[0\].causal must be True or False, got 2"),
    ]:
        with pytest.raises(mk.InvalidArgument, match=f"^rows_from_flashmask: .*{words}"):
            mk.mask.rows_from_flashmask(columns, batch)
