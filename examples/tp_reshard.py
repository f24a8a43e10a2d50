"""Send blocks from two prefill ranks to one decode rank, which has all heads in another layout."""

import torch

import mooncake_kernels as mk

NUM_HEADS, NUM_LAYERS, PREFILL_RANKS = 8, 4, 2
whole = [torch.randn(2, 16, 16, NUM_HEADS, 64) for _ in range(NUM_LAYERS)]
decode = mk.KVView(
    torch.zeros(16, NUM_LAYERS, 2, NUM_HEADS, 16, 64), axes="block layer kv head token dim"
)
receiver = mk.Packer(decode)

for rank in range(PREFILL_RANKS):
    # Each rank holds its own heads, and knows nothing about the receiver's layout.
    heads = slice(rank * NUM_HEADS // PREFILL_RANKS, (rank + 1) * NUM_HEADS // PREFILL_RANKS)
    shard = [layer[..., heads, :].contiguous() for layer in whole]
    packer = mk.Packer(mk.KVView(shard, axes="kv block token head dim"), first_head=heads.start)
    staging = torch.empty(packer.header(3).num_bytes, dtype=torch.uint8)
    header = packer.pack([3, 1, 4], staging)  # with checksums
    # What travels: `staging` as one write, `header.to_bytes()` with the request's message.
    receiver.unpack(header.to_bytes(), staging, [5, 6, 7])

source = mk.KVView(whole, axes="kv block token head dim")
axes = decode.packed_axes  # the same for both, as their layouts differ
sent = mk.gather_blocks(source, [3, 1, 4], axes=axes)
assert torch.equal(mk.gather_blocks(decode, [5, 6, 7], axes=axes), sent)

# Within a process no staging is needed: which heads go from rank 1 of 2 to rank 2 of 4?
src_heads, dst_heads = mk.shard_heads(NUM_HEADS, src=(1, 2), dst=(2, 4))
print(f"rank 1 of 2 gives its heads {src_heads} to rank 2 of 4, as {dst_heads}")
