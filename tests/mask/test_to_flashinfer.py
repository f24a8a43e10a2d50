"""FlashInfer's tiles and their mask, read as its block-sparse kernel does, against the dense mask.

A decoder of flashinfer/sparse.py (0.7.2): rows of blocks, and in each a flat mask, queries first.
"""

from itertools import pairwise

import pytest
import torch

import mooncake_kernels as mk
from tests.mask.examples import EXAMPLES, MIXED, RULES


def seen_by(blocks: mk.mask.FlashInferBlocks) -> torch.Tensor:
    """Return bool [M, N]: which queries see which keys, as the kernel finds it."""
    indptr, indices, num_q, num_keys, block_q, block_kv, mask = blocks
    assert indptr.dtype == indices.dtype == torch.int32
    begins = indptr.tolist()
    cu_q = [*range(0, num_q, block_q), num_q] if num_q else [0]  # block_q * arange, and M
    assert len(cu_q) == len(begins) and indices.numel() == begins[-1]
    seen = torch.zeros(num_q, num_keys, dtype=torch.bool)
    for i, (begin, end) in enumerate(pairwise(begins)):
        own = indices[begin:end].tolist()
        assert len(own) == len(set(own))
        q_len, kv_len = cu_q[i + 1] - cu_q[i], len(own) * block_kv
        flat = torch.ones(block_q * kv_len, dtype=torch.bool)
        if mask is not None:
            flat = mask[begin:end].cpu().transpose(0, 1).reshape(-1)
        tiles = flat[: q_len * kv_len].view(q_len, len(own), block_kv)
        for t, j in enumerate(own):
            columns = slice(j * block_kv, (j + 1) * block_kv)
            assert j * block_kv < num_keys
            seen[cu_q[i] : cu_q[i + 1], columns] = tiles[:, t]
    return seen


def expected(rows: mk.MaskRows, places: list[list[int]], block_kv: int, size: int) -> torch.Tensor:
    """Return the same from the dense mask, keys of a request being where its blocks are."""
    seen = torch.zeros(rows.batch.num_q, size * block_kv, dtype=torch.bool)
    begins = rows.batch.cu_q.tolist()
    for b, mask in enumerate(rows.dense()):
        for t, block in enumerate(places[b]):
            tile = mask[:, t * block_kv : (t + 1) * block_kv].cpu()
            first = block * block_kv
            seen[begins[b] : begins[b + 1], first : first + tile.shape[1]] = tile
    return seen


def places_of(rows: mk.MaskRows, block_kv: int) -> tuple[list[list[int]], int]:
    places, first = [], 0
    for kv_len in rows.batch.kv_lens_list:
        count = -(-kv_len // block_kv)
        places.append([*range(first, first + count)])
        first += count
    return places, first


def test_causal_and_full_differ_only_in_the_mask() -> None:
    batch = mk.ChunkBatch([4], [4])
    maps = [
        mk.mask.rows(rule, batch).block_map(4, 4) for rule in (mk.mask.causal(), mk.mask.full())
    ]
    assert all(torch.equal(a, b) for a, b in zip(maps[0].bsr(), maps[1].bsr(), strict=True))
    causal, full = (block_map.to_flashinfer() for block_map in maps)
    assert causal.mask is not None and causal.mask[0].tolist() == torch.ones(4, 4).tril().tolist()
    assert full.mask is None


@pytest.mark.parametrize("block_kv", [1, 3, 16, 64])
@pytest.mark.parametrize("name", EXAMPLES)
def test_single_query_rows_match_the_dense_mask(name: str, block_kv: int) -> None:
    rows = EXAMPLES[name]
    blocks = rows.block_map(1, block_kv).to_flashinfer()
    places, size = places_of(rows, block_kv)
    assert torch.equal(seen_by(blocks), expected(rows, places, block_kv, size))


@pytest.mark.parametrize("rule", RULES)
def test_query_blocks_with_a_short_last_one(engine, rule: str) -> None:
    batch = mk.ChunkBatch([8, 0, 4, 6], [17, 3, 4, 40], device=engine.device)
    rows = mk.mask.rows(RULES[rule], batch)
    for block_kv in (4, 16):
        block_map = rows.block_map(4, block_kv, engine=engine.engine, num_q_blocks=9)
        places, size = places_of(rows, block_kv)
        found = seen_by(block_map.to_flashinfer())
        assert torch.equal(found, expected(rows, places, block_kv, size))


def test_columns_of_a_physical_cache(engine) -> None:
    batch = mk.ChunkBatch([4, 3], [40, 33], device=engine.device)
    rows = mk.mask.rows(RULES["window_and_sink"], batch)
    table = torch.tensor([[7, 5, 9], [1, 0, 2]], device=engine.device)
    blocks = rows.block_map(4, 16, engine=engine.engine).to_flashinfer(table, num_blocks=10)
    assert (blocks.M, blocks.N, blocks.R, blocks.C) == (7, 160, 4, 16)
    assert torch.equal(seen_by(blocks), expected(rows, table.tolist(), 16, 10))


def test_unsupported_batches_are_rejected() -> None:
    rows = mk.mask.rows(mk.mask.causal(), MIXED)
    with pytest.raises(mk.InvalidArgument, match="all requests but the last, got 4 and 1 of req"):
        rows.block_map(4, 4).to_flashinfer()
    one = mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([4], [4])).block_map(4, 4)
    with pytest.raises(mk.InvalidArgument, match="block_table and num_blocks must be given toge"):
        one.to_flashinfer(torch.zeros(1, 1).int())
    with pytest.raises(mk.InvalidArgument, match=r"block_table\[0, 0\] must be a block, 0 to 2"):
        one.to_flashinfer(torch.tensor([[3]]), num_blocks=3)
    with pytest.raises(mk.InvalidArgument, match="to_flashinfer: N must be an integer in 0 to"):
        one.to_flashinfer(torch.zeros(1, 1).int(), num_blocks=2**30)
