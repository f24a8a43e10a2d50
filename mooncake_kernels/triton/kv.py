"""copy_blocks in Triton, from the same plan as the CUDA kernel."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from .._tensors import is_captured
from ..errors import InvalidArgument
from ..kv.layout import HEADER, PLANE_FIELDS, SIDE_FIELDS
from ..kv.view import PlanTensor
from . import check_grid

WORDS_PER_PROGRAM = 1024
WORD_TYPES = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


# A packed side has as many ids as the call: these are not worth another compilation.
@triton.jit(do_not_specialize=["num_src_ids", "num_dst_ids"])
def copy_blocks_kernel(
    src_base,  # added to the addresses
    dst_base,
    src_planes,  # *i64 [num_planes]: addresses
    dst_planes,  # *i64 [num_planes]
    src_ids,  # *i32 or *i64; unused without HAS_SRC
    dst_ids,
    bad,  # *i64 [3]: side (-1: being written), index, id
    num_planes,
    num_src_ids,  # the six numbers per side are described in csrc/kv/copy_blocks.h
    src_block_stride,  # bytes, as all strides
    src_pieces_per_id,
    src_piece_stride,
    src_slots_per_block,
    src_slot_stride,
    num_dst_ids,
    dst_block_stride,
    dst_pieces_per_id,
    dst_piece_stride,
    dst_slots_per_block,
    dst_slot_stride,
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
    piece = index // (extent0 * extent1) // num_planes

    src_index = piece // src_pieces_per_id
    dst_index = piece // dst_pieces_per_id
    src_id = tl.load(src_ids + src_index).to(tl.int64) if HAS_SRC else src_index
    dst_id = tl.load(dst_ids + dst_index).to(tl.int64) if HAS_DST else dst_index
    src_is_bad = (src_id < -1) | (src_id >= num_src_ids)
    dst_is_bad = (dst_id < -1) | (dst_id >= num_dst_ids)
    if src_is_bad | dst_is_bad:
        side = tl.where(src_is_bad, 1, 2).to(tl.int64)
        if tl.atomic_cas(bad, tl.zeros_like(side), tl.zeros_like(side) - 1) == 0:
            tl.store(bad + 1, tl.where(src_is_bad, src_index, dst_index))
            tl.store(bad + 2, tl.where(src_is_bad, src_id, dst_id))
            tl.atomic_xchg(bad, side, sem="release", scope="sys")  # last: the host polls it
    src_is_good = (src_id >= 0) & (src_id < num_src_ids)
    dst_is_good = (dst_id >= 0) & (dst_id < num_dst_ids)
    num_wanted = tl.where(src_is_good & dst_is_good, run_words, 0)

    a, b = run // extent1, run % extent1
    src = src_base + tl.load(src_planes + plane) + a * src_stride0
    src += src_id // src_slots_per_block * src_block_stride
    src += src_id % src_slots_per_block * src_slot_stride
    src += piece % src_pieces_per_id * src_piece_stride
    dst = dst_base + tl.load(dst_planes + plane) + a * dst_stride0
    dst += dst_id // dst_slots_per_block * dst_block_stride
    dst += dst_id % dst_slots_per_block * dst_slot_stride
    dst += piece % dst_pieces_per_id * dst_piece_stride
    word = tile % tiles_per_run * NUM_WORDS + tl.arange(0, NUM_WORDS)
    mask = word < num_wanted
    src_words = (src + b * src_stride1).to(tl.pointer_type(WORD)) + word
    dst_words = (dst + b * dst_stride1).to(tl.pointer_type(WORD)) + word
    tl.store(dst_words, tl.load(src_words, mask=mask), mask=mask)


def copy_blocks(
    src: Sequence[torch.Tensor],
    dst: Sequence[torch.Tensor],
    plan: PlanTensor,
    src_ids: torch.Tensor | None,
    dst_ids: torch.Tensor | None,
    bad: torch.Tensor,
) -> None:
    """Run the plan; arguments as for ``torch.ops.mooncake_kernels.copy_blocks``.

    Unlike the CUDA kernel it reads the planes' addresses in the device's memory. The plan keeps
    them there: the first run, and one after a cache was moved, waits for their copy.

    Raises:
        InvalidArgument: that run is being captured into a CUDA graph.
    """
    device = src[0].device
    values = plan.values.tolist()
    src_side, dst_side = values[1 : 1 + SIDE_FIELDS], values[1 + SIDE_FIELDS : 1 + 2 * SIDE_FIELDS]
    run_bytes, *axes = values[1 + 2 * SIDE_FIELDS : HEADER]
    planes = values[HEADER:]
    num_pieces = _num_pieces((src_side, src_ids), (dst_side, dst_ids))
    src_base, src_planes = _addresses(src, planes[0::PLANE_FIELDS], planes[1::PLANE_FIELDS])
    dst_base, dst_planes = _addresses(dst, planes[2::PLANE_FIELDS], planes[3::PLANE_FIELDS])
    word_bytes = _alignment(
        [src_base, dst_base, *src_planes, *dst_planes, run_bytes]
        + [stride for side in (src_side, dst_side) for stride in side[1::2]]
        + [stride for i, stride in enumerate(axes) if i % 3]
    )
    run_words = run_bytes // word_bytes
    num_runs = num_pieces * len(src_planes) * axes[0] * axes[3]
    if num_runs == 0 or run_words == 0:
        return
    num_words = min(WORDS_PER_PROGRAM, triton.next_power_of_2(run_words))
    tiles_per_run = triton.cdiv(run_words, num_words)
    check_grid("copy_blocks: ids", "runs of bytes", (num_runs * tiles_per_run,))
    with torch.cuda.device_of(src[0]):  # Triton launches on the current device
        copy_blocks_kernel[(num_runs * tiles_per_run,)](
            *(src_base, dst_base, *_kept_planes(plan, src_planes, dst_planes, device)),
            src_ids if src_ids is not None else dst_ids,
            dst_ids if dst_ids is not None else src_ids,
            bad,
            *(len(src_planes), *src_side, *dst_side, run_words, tiles_per_run, *axes),
            HAS_SRC=src_ids is not None,
            HAS_DST=dst_ids is not None,
            WORD=WORD_TYPES[word_bytes],
            NUM_WORDS=num_words,
        )


def _num_pieces(*sides: tuple[list[int], torch.Tensor | None]) -> int:
    """Count what the ids name; a side without ids takes as many as the other."""
    counts = [ids.numel() * side[2] for side, ids in sides if ids is not None]
    if not counts:
        raise InvalidArgument("copy_blocks: src_blocks or dst_blocks must be given")
    for side, ids in sides:
        if ids is None:
            side[0] = triton.cdiv(min(counts), side[2])
    return min(counts)


def _addresses(
    tensors: Sequence[torch.Tensor], indices: Sequence[int], offsets: Sequence[int]
) -> tuple[int, tuple[int, ...]]:
    """Return a base and the planes' addresses relative to it.

    The base of a single tensor is its address: packed blocks are elsewhere at each call.
    """
    if len(tensors) == 1:
        return tensors[0].data_ptr(), tuple(offsets)
    bases = [tensor.data_ptr() for tensor in tensors]
    return 0, tuple(bases[index] + offset for index, offset in zip(indices, offsets, strict=True))


def _kept_planes(
    plan: PlanTensor, src: tuple[int, ...], dst: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    key = (device, src, dst)
    if plan.triton_planes is None or plan.triton_planes[0] != key:
        if device.type == "cuda" and is_captured():
            raise InvalidArgument(
                "engine triton: a plan must have run once before a CUDA graph is captured"
            )
        tensors = tuple(torch.tensor(planes, device=device) for planes in (src, dst))
        plan.triton_planes = (key, tensors)
    return plan.triton_planes[1]


def _alignment(numbers: Sequence[int]) -> int:
    """Return the largest power of two, at most 8, that divides every number."""
    bits = 8
    for number in numbers:
        bits |= number
    return bits & -bits
