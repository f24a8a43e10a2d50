"""Attend over a paged cache: a decode and a prefill chunk in one call; merged parts."""

import torch

import mooncake_kernels as mk

heads, kv_heads, dim, block_size = 8, 2, 64, 16
k_cache, v_cache = torch.zeros(2, 16, block_size, kv_heads, dim)
table = torch.tensor([[3, 1, 4, 0], [5, 9, 2, 6]], dtype=torch.int32)  # the blocks of each request

batch = mk.ChunkBatch(q_lens=[40, 52], kv_lens=[40, 52])  # two prompts, whole
positions, request = batch.query_positions(), batch.request_of()
slots = table[request, positions // block_size].long() * block_size + positions % block_size
k, v = torch.randn(2, batch.num_q, kv_heads, dim)
mk.append_kv(k, v, k_cache, v_cache, slots)

step = mk.ChunkBatch(q_lens=[1, 20], kv_lens=[40, 52])  # a decode, and the end of the other
rows = mk.mask.rows(mk.mask.causal(), step)
q = torch.randn(step.num_q, heads, dim)
out, lse = mk.paged_attention(q, k_cache, v_cache, table, rows)

# The decode, against torch.
keys, values = (t[:40].repeat_interleave(heads // kv_heads, 1).transpose(0, 1) for t in (k, v))
expected = torch.nn.functional.scaled_dot_product_attention(q[0][:, None], keys, values)[:, 0]
torch.testing.assert_close(out[0], expected, rtol=1e-4, atol=1e-4)

# DistAttention: attend to the first two blocks and to the rest apart, and merge.
first = mk.ChunkBatch(q_lens=[1], kv_lens=[32])
rest = mk.ChunkBatch(q_lens=[1], kv_lens=[8])
parts = [
    mk.paged_attention(q[:1], k_cache, v_cache, blocks, mk.mask.rows(mk.mask.causal(), part))
    for part, blocks in ((first, table[:1, :2]), (rest, table[:1, 2:3]))
]
merged, _ = mk.merge_attention(*(torch.stack(each) for each in zip(*parts, strict=True)))
torch.testing.assert_close(merged, out[:1], rtol=1e-4, atol=1e-4)
print("one call, torch and two merged parts agree")
