"""Partial attention at a lender, and the merge at the borrower, against float64."""

import pytest
import torch

import mooncake_kernels as mk
from mooncake_serving.dist_attention import DistAttention, Offer
from mooncake_serving.dist_attention.partial import PartialAttention

from .conftest import BLOCK_SIZE, CONFIG, attend_to, make_cache

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 3e-2}


def queries(num_rows, dtype=torch.float32):
    generator = torch.Generator().manual_seed(9)
    return torch.randn(num_rows, CONFIG.num_heads, CONFIG.head_dim, generator=generator).to(dtype)


def keys(cache, layer, block_ids):
    """The keys and values of some blocks, token after token."""
    return [tensor[block_ids].flatten(0, 1) for tensor in cache.layer(layer)]


def causal(q_len, kv_len):
    return mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([q_len], [kv_len]))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("axes", ["kv block token head dim", "block layer kv head token dim"])
def test_parts_of_any_length_are_attended_to(dtype, axes):
    cache = make_cache(dtype=dtype, axes=axes)
    attention = PartialAttention(cache)
    parts = [(1, [3, 1, 2]), (11, [5]), (5, [7, 6, 9, 8])]  # 11 queries, but 4 keys
    q = queries(17, dtype)
    for layer in range(CONFIG.num_layers):
        out, lse = attention.attend(layer, q, parts)
        assert out.dtype == dtype and lse.isfinite().all()
        row = 0
        for q_len, block_ids in parts:
            for _ in range(q_len):
                want = attend_to(q[row], *keys(cache, layer, block_ids))
                assert (out[row].double() - want).abs().max() < TOLERANCE[dtype]
                row += 1
    alone, _ = attention.attend(0, q[1:12], parts[1:2])  # other lengths: prepared anew
    assert torch.equal(alone, attention.attend(0, q, parts)[0][1:12])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_lenders", [1, 2, 3])
def test_merged_parts_equal_attention_over_all_keys(join, dtype, num_lenders):
    """A chunk of 6 queries: its first 16 keys elsewhere, 10 here, of which 6 are its own."""
    home = join(dtype=dtype)
    lenders = [join(dtype=dtype) for _ in range(num_lenders)]
    lent = home.blocks.take(4)
    here = home.blocks.take(3)
    shares = [4 // num_lenders] * (num_lenders - 1)
    shares.append(4 - sum(shares))
    loans, moved = [], 0
    for lender, share in zip(lenders, shares, strict=True):
        loans += home.borrower.reserve(share, [Offer(lender.name, share)])
        assert home.borrower.store(loans[-1], lent[moved : moved + share]) == share
        moved += share
    q = queries(6, dtype)
    attention = DistAttention(home.borrower, [6], [loans])
    for layer in range(CONFIG.num_layers):
        k_cache, v_cache = home.cache.layer(layer)

        def local(q, k_cache=k_cache, v_cache=v_cache):
            table = torch.tensor([here], dtype=torch.int32)
            return mk.paged_attention(q, k_cache, v_cache, table, causal(6, 10))

        out, lse = attention.attend(layer, q, local)
        k, v = keys(home.cache, layer, lent + here)
        for row in range(6):
            seen = 4 * BLOCK_SIZE + 4 + row + 1
            want = attend_to(q[row], k[:seen], v[:seen])
            assert (out[row].double() - want).abs().max() < TOLERANCE[dtype]
        assert lse.shape == (6, CONFIG.num_heads)
    home.blocks.give_back(lent + here)
