"""copy_blocks in Triton, from the same plan as the CUDA kernel."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .._layout import HEADER, PLANE_FIELDS
from ..errors import InvalidArgument, Unavailable

WORDS_PER_PROGRAM = 1024
INTERPRETED = triton.knobs.runtime.interpret  # triton.jit looks at it once, here
WORD_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


@triton.jit
def copy_blocks_kernel(
    src_planes,  # *i64 [num_planes]: addresses
    dst_planes,  # *i64 [num_planes]
    src_blocks,  # *i32 or *i64 [num_pairs]; unused without HAS_SRC
    dst_blocks,
    bad,  # *i64 [3]: side (-1: being written), pair, id
    num_planes,
    num_src_blocks,
    num_dst_blocks,
    src_block_stride,  # bytes, as all strides
    dst_block_stride,
    run_words,
    tiles_per_run,
    extent0,
    src_stride0,
    dst_stride0,
    extent1,
    src_stride1,
    dst_stride1,
    HAS_SRC: tl.constexpr,  # noqa: N803 - Triton's custom for constants
    HAS_DST: tl.constexpr,  # noqa: N803
    WORD: tl.constexpr,  # noqa: N803
    NUM_WORDS: tl.constexpr,  # noqa: N803
):
    """Program r * tiles_per_run + c copies words [c * NUM_WORDS, (c + 1) * NUM_WORDS) of run r."""
    tile = tl.program_id(0).to(tl.int64)
    index = tile // tiles_per_run
    run = index % (extent0 * extent1)
    plane = (index // (extent0 * extent1)) % num_planes
    pair = index // (extent0 * extent1) // num_planes

    src_id = tl.load(src_blocks + pair).to(tl.int64) if HAS_SRC else pair
    dst_id = tl.load(dst_blocks + pair).to(tl.int64) if HAS_DST else pair
    src_is_bad = (src_id < -1) | (src_id >= num_src_blocks)
    dst_is_bad = (dst_id < -1) | (dst_id >= num_dst_blocks)
    if src_is_bad | dst_is_bad:
        side = tl.where(src_is_bad, 1, 2).to(tl.int64)
        if tl.atomic_cas(bad, tl.zeros_like(side), tl.zeros_like(side) - 1) == 0:
            tl.store(bad + 1, pair)
            tl.store(bad + 2, tl.where(src_is_bad, src_id, dst_id))
            tl.atomic_xchg(bad, side, sem="release", scope="sys")  # last: the host looks at it
    src_is_good = (src_id >= 0) & (src_id < num_src_blocks)
    dst_is_good = (dst_id >= 0) & (dst_id < num_dst_blocks)
    num_wanted = tl.where(src_is_good & dst_is_good, run_words, 0)

    a, b = run // extent1, run % extent1
    src = tl.load(src_planes + plane) + src_id * src_block_stride + a * src_stride0
    dst = tl.load(dst_planes + plane) + dst_id * dst_block_stride + a * dst_stride0
    word = tile % tiles_per_run * NUM_WORDS + tl.arange(0, NUM_WORDS)
    mask = word < num_wanted
    src_words = (src + b * src_stride1).to(tl.pointer_type(WORD)) + word
    dst_words = (dst + b * dst_stride1).to(tl.pointer_type(WORD)) + word
    tl.store(dst_words, tl.load(src_words, mask=mask), mask=mask)


def copy_blocks(
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    plan: torch.Tensor,
    src_blocks: torch.Tensor | None,
    dst_blocks: torch.Tensor | None,
    bad: torch.Tensor,
) -> None:
    """Run the plan; the arguments are those of ``torch.ops.mooncake_kernels.copy_blocks``.

    Unlike the CUDA kernel it uploads the planes' addresses at each call.

    Raises:
        Unavailable: the tensors are on the CPU and Triton is not in its interpreter.
    """
    device = src[0].device
    if device.type == "cpu" and not INTERPRETED:
        raise Unavailable(
            "engine triton: CPU tensors need TRITON_INTERPRET=1 set before the import"
        )
    values = plan.tolist()
    ids = src_blocks if src_blocks is not None else dst_blocks
    if ids is None:
        raise InvalidArgument("copy_blocks: src_blocks or dst_blocks must be given")
    num_src_blocks = values[0] if src_blocks is not None else ids.numel()
    num_dst_blocks = values[1] if dst_blocks is not None else ids.numel()
    src_block_stride, dst_block_stride, run_bytes, *axes = values[2:HEADER]
    planes = values[HEADER:]
    src_planes = _addresses(src, planes[0::PLANE_FIELDS], planes[1::PLANE_FIELDS])
    dst_planes = _addresses(dst, planes[2::PLANE_FIELDS], planes[3::PLANE_FIELDS])
    word_bytes = _alignment(
        [*src_planes, *dst_planes, src_block_stride, dst_block_stride, run_bytes]
        + [stride for i, stride in enumerate(axes) if i % 3]
    )
    run_words = run_bytes // word_bytes
    num_runs = ids.numel() * len(src_planes) * axes[0] * axes[3]
    if num_runs == 0 or run_words == 0:
        return
    num_words = min(WORDS_PER_PROGRAM, triton.next_power_of_2(run_words))
    tiles_per_run = triton.cdiv(run_words, num_words)
    with torch.cuda.device_of(src[0]):  # Triton launches on the current device
        copy_blocks_kernel[(num_runs * tiles_per_run,)](
            torch.tensor(src_planes, device=device),
            torch.tensor(dst_planes, device=device),
            src_blocks if src_blocks is not None else ids,
            dst_blocks if dst_blocks is not None else ids,
            bad,
            *(len(src_planes), num_src_blocks, num_dst_blocks, src_block_stride, dst_block_stride),
            *(run_words, tiles_per_run, *axes),
            HAS_SRC=src_blocks is not None,
            HAS_DST=dst_blocks is not None,
            WORD=WORD_TYPES[word_bytes],
            NUM_WORDS=num_words,
        )


def _addresses(
    tensors: Sequence[torch.Tensor], indices: Sequence[int], offsets: Sequence[int]
) -> list[int]:
    bases = [tensor.data_ptr() for tensor in tensors]
    return [bases[index] + offset for index, offset in zip(indices, offsets, strict=True)]


def _alignment(numbers: Sequence[int]) -> int:
    """Return the largest power of two, at most 8, that divides every number."""
    bits = 8
    for number in numbers:
        bits |= number
    return bits & -bits
