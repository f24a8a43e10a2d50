"""Copy KV blocks between caches of two layouts, dtypes and block sizes."""

import torch

import mooncake_kernels as mk

# vLLM-like: one tensor per layer. The other cache: one tensor, blocks outermost.
layers = [torch.randn(2, 64, 16, 8, 128) for _ in range(4)]
src = mk.KVView(layers, axes="kv block token head dim")
dst = mk.KVView(torch.zeros(64, 4, 2, 8, 16, 128), axes="block layer kv head token dim")

plan = mk.CopyPlan(src, dst)  # made once
plan.run([3, 1, 4], [0, 1, -1])  # -1 skips a pair
assert torch.equal(dst.tensors[0][1, 2, 0], layers[2][0, 1].transpose(0, 1))

# Single tokens: a slot is block * block_size + offset.
plan.run_slots([48, 17], [5, 6])

# A cache of fp8 with blocks of 32: converted on the way, two blocks of 16 per block of 32.
small = torch.zeros(2, 32, 32, 8, 128, dtype=torch.float8_e4m3fn)
small_view = mk.KVView([small.clone() for _ in layers], axes="kv block token head dim")
to_fp8 = mk.CopyPlan(src, small_view, convert=mk.Fp8(scale=0.5))
to_fp8.run([3, 1], [7])
error = (small_view.tensors[0][:, 7].float() * 0.5 - layers[0][:, [3, 1]].flatten(1, 2)).abs().max()
print(f"copied between {src.axes!r} and {dst.axes!r}; fp8 is within {error:.2f}")
