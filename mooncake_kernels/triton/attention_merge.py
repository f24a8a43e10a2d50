"""merge_attention in Triton: for a GPU without nvcc, and for the splits of paged_attention."""

# ruff: noqa: N803 - constants in capitals are Triton's custom

import torch
import triton
import triton.language as tl

from . import check_grid


@triton.jit(do_not_specialize=["num_parts", "num_rows"])  # of a batch
def merge_attention_kernel(
    outs,  # [num_parts, num_rows, DIM]
    lses,  # *f32 [num_parts, num_rows]
    out,  # [num_rows, DIM]
    lse,  # *f32 [num_rows]
    num_parts,
    num_rows,
    DIM: tl.constexpr,
    PADDED: tl.constexpr,  # a power of 2, at least DIM
    IS_LOG2: tl.constexpr,
):
    """Program r merges row r."""
    row, num_rows = tl.program_id(0).to(tl.int64), num_rows.to(tl.int64)
    to_log2 = 1.0 if IS_LOG2 else 1.4426950408889634
    dims = tl.arange(0, PADDED)
    largest = tl.full([], float("-inf"), dtype=tl.float32)
    for part in range(num_parts):
        own = tl.load(lses + part * num_rows + row) * to_log2
        largest = tl.maximum(largest, own, propagate_nan=tl.PropagateNan.ALL)
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros([], dtype=tl.float32)
    sums = tl.zeros([PADDED], dtype=tl.float32)
    for part in range(num_parts):
        weight = tl.exp2(tl.load(lses + part * num_rows + row) * to_log2 - base)
        num_wanted = tl.where(weight > 0, DIM, 0)  # a part without keys is not read
        values = tl.load(outs + (part * num_rows + row) * DIM + dims,
                         mask=dims < num_wanted, other=0.0)  # fmt: skip
        total += weight
        sums += weight * values.to(tl.float32)
    is_empty = total == 0.0  # false for NaN lses
    values = tl.where(is_empty, 0.0, sums / tl.where(is_empty, 1.0, total))
    tl.store(out + row * DIM + dims, values.to(out.dtype.element_ty), mask=dims < DIM)
    merged = largest + tl.log2(tl.where(is_empty, 1.0, total))
    merged = tl.where(largest == float("inf"), largest, merged)  # total is NaN then
    tl.store(lse + row, merged / to_log2)


def merge_attention(
    outs: torch.Tensor, lses: torch.Tensor, is_log2: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the kernel; the arguments are those of ``torch.ops.mooncake_kernels.merge_attention``."""
    num_parts, num_q, num_heads, dim = outs.shape
    check_grid("merge_attention: outs", "queries and heads", (num_q * num_heads,))
    out, lse = outs.new_empty(outs.shape[1:]), lses.new_empty(lses.shape[1:])
    if out.numel() == 0:
        return out, lse.fill_(float("-inf"))
    with torch.cuda.device_of(outs):
        merge_attention_kernel[(num_q * num_heads,)](
            outs, lses, out, lse, num_parts, num_q * num_heads,
            DIM=dim, PADDED=triton.next_power_of_2(dim), IS_LOG2=is_log2,
        )  # fmt: skip
    return out, lse
