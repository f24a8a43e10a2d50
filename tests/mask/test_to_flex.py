"""Block masks for FlexAttention: those of create_block_mask, and the attention they make."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import mooncake_kernels as mk
from tests.mask.examples import EXAMPLES, MIXED, RULES, TREE, attention, dense_masks, equal

LISTS = ("kv", "full_kv", "q", "full_q")
ONE = mk.mask.rows((mk.mask.causal() & mk.mask.sliding_window(40)) | mk.mask.sink(3),
                   mk.ChunkBatch([70], [150]))  # fmt: skip


def packed(masks: list[torch.Tensor]) -> torch.Tensor:
    """The dense mask of the packed sequence: each request's on the diagonal."""
    return torch.block_diag(*masks).bool() if masks else torch.zeros(0, 0, dtype=torch.bool)


def blocks(mask: BlockMask, which: str) -> list[set[int]]:
    counts = getattr(mask, f"{which}_num_blocks")[0, 0].tolist()
    indices = getattr(mask, f"{which}_indices")[0, 0].tolist()
    lists = [row[:count] for row, count in zip(indices, counts, strict=True)]
    assert all(row == sorted(set(row)) for row in lists)
    return [set(row) for row in lists]


def theirs(dense: torch.Tensor, block_size: tuple[int, int]) -> BlockMask:
    def look_up(b, h, q, kv):
        return dense[q, kv]

    return create_block_mask(look_up, 1, 1, *dense.shape, device="cpu", BLOCK_SIZE=block_size)


def check_blocks(rows: mk.MaskRows, block_size: tuple[int, int]) -> None:
    dense = packed(rows.dense())
    ours = rows.block_map(*block_size).to_flex(compute_q_blocks=True)
    want = theirs(dense, block_size)
    assert ours.shape == want.shape and ours.BLOCK_SIZE == want.BLOCK_SIZE
    for which in LISTS:
        assert blocks(ours, which) == blocks(want, which), which
    assert ours.sparsity() == want.sparsity() and torch.equal(ours.to_dense(), want.to_dense())
    q, kv = torch.arange(dense.shape[0])[:, None], torch.arange(dense.shape[1])
    zero = torch.tensor(0)
    assert torch.equal(ours.mask_mod(zero, zero, q, kv), dense)


@pytest.mark.parametrize("block_size", [(1, 1), (4, 8), (16, 3), (128, 128)])
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "empty"])
def test_blocks_match_create_block_mask(name: str, block_size: tuple[int, int]) -> None:
    check_blocks(EXAMPLES[name], block_size)


@pytest.mark.parametrize("whole", [False, True])
def test_single_request_reuses_the_lists_of_the_map(whole: bool) -> None:
    check_blocks(ONE, (16, 32))
    mask = ONE.block_map(16, 32, whole=whole).to_flex()
    assert blocks(mask, "full_kv") == blocks(theirs(packed(ONE.dense()), (16, 32)), "full_kv")


@given(masks=dense_masks(), block_q=st.integers(1, 20), block_kv=st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_random_masks_match_create_block_mask(
    masks: list[torch.Tensor], block_q: int, block_kv: int
) -> None:
    if sum(map(len, masks)):
        check_blocks(mk.mask.rows_from_dense(masks), (block_q, block_kv))


def attended(rows: mk.MaskRows, mask: BlockMask, run) -> tuple[torch.Tensor, torch.Tensor]:
    """What FlexAttention makes of packed requests, and each request's attention by itself."""
    torch.manual_seed(0)
    q_lens, kv_lens = rows.batch.q_lens_list, rows.batch.kv_lens_list
    q = torch.randn(1, 2, sum(q_lens), 16)
    k, v = torch.randn(2, 1, 2, sum(kv_lens), 16)
    out = run(q, k, v, block_mask=mask)
    pieces = [q.split(q_lens, 2), k.split(kv_lens, 2), v.split(kv_lens, 2), rows.dense()]
    alone = [
        torch.stack([attention(*(x[0, head] for x in qkv), seen) for head in range(2)])
        for *qkv, seen in zip(*pieces, strict=True)
    ]
    return out[0].double(), torch.cat(alone, dim=1)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "empty"])
def test_eager_attention_matches_the_dense_mask(name: str) -> None:
    rows = EXAMPLES[name]
    got, want = attended(rows, rows.block_map(16, 16).to_flex(), flex_attention)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_compiled_attention_matches_the_dense_mask(soak: bool) -> None:
    """By default what has most to compile: several requests, and tail bits."""
    for rows in [EXAMPLES["tree"], *([ONE, EXAMPLES["window_and_sink"]] if soak else [])]:
        torch._dynamo.reset()
        run = torch.compile(flex_attention)
        got, want = attended(rows, rows.block_map(32, 32).to_flex(), run)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_batch_without_queries_has_an_empty_block_mask() -> None:
    for lengths in (([], []), ([0], [5]), ([0, 0], [5, 7])):
        rows = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch(*lengths))
        assert rows.block_map(4, 4).to_flex().shape == (1, 1, 0, sum(lengths[1]))


def test_a_batch_with_several_tails() -> None:
    assert int((EXAMPLES["tree"].tail_base < TREE.kv_lens).sum()) == 2
    check_blocks(EXAMPLES["tree"], (2, 3))


@pytest.mark.parametrize("name", RULES)
def test_block_mask_of_a_batch_round_trips_to_rows(name: str) -> None:
    rows = EXAMPLES[name]
    again = mk.mask.rows_from_flex(rows.block_map(4, 8).to_flex(), MIXED)
    assert equal(again.dense(), rows.dense())


def test_block_mask_made_by_torch_converts_to_rows() -> None:
    def causal_after_4(b, h, q, kv):
        return (kv <= q + 10) & (kv >= 4 * b)

    mask = create_block_mask(causal_after_4, 2, 1, 30, 40, device="cpu", BLOCK_SIZE=8)
    rows = mk.mask.rows_from_flex(mask)
    assert rows.batch.kv_lens_list == [40, 40]
    for first, dense in enumerate(rows.dense()):
        q, kv = torch.arange(30)[:, None], torch.arange(40)
        assert torch.equal(dense, (kv <= q + 10) & (kv >= 4 * first))


def test_unlisted_blocks_are_masked() -> None:
    """A block mask whose mask_mod sees all: of the listed blocks alone, one of them full."""
    count, index = torch.ones(1, 1, 2, dtype=torch.int32), torch.tensor([[[[1], [0]]]])
    mask = BlockMask.from_kv_blocks(
        count, index, count, 1 - index, (2, 4), lambda b, h, q, kv: kv % 4 == q, (3, 6)
    )
    [dense] = mk.mask.rows_from_flex(mask).dense()
    assert dense.int().tolist() == [[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 0, 1], [0, 0, 1, 0, 1, 1]]


def test_bad_block_masks_are_rejected() -> None:
    every = create_block_mask(lambda b, h, q, kv: q >= 0, 1, 2, 4, 8, device="cpu")
    with pytest.raises(mk.InvalidArgument, match="block_mask must have one head, got 2"):
        mk.mask.rows_from_flex(every)
    one = create_block_mask(lambda b, h, q, kv: q >= 0, 1, 1, 4, 8, device="cpu")
    with pytest.raises(mk.InvalidArgument, match="got row 0, of request 0, which sees others"):
        mk.mask.rows_from_flex(one, mk.ChunkBatch([2, 2], [4, 4]))
    with pytest.raises(mk.InvalidArgument, match=r"\(1, 4, 9\), got \(1, 4, 8\)"):
        mk.mask.rows_from_flex(one, mk.ChunkBatch([2, 2], [4, 5]))
    with pytest.raises(mk.InvalidArgument, match="block_mask must be a BlockMask"):
        mk.mask.rows_from_flex(None)
