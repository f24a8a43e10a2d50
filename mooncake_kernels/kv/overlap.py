"""Whether a copy reads what it writes: asked only of caches whose memory touches."""

from bisect import bisect_left
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from ..errors import InvalidArgument
from .copy_jobs import Job
from .execute import have_addresses
from .layout import HEADER, MAX_AXES, PLANE_FIELDS, SIDE_FIELDS
from .view import KVView


def touch(src: KVView, dst: KVView) -> bool:
    """Tell whether a tensor of src and one of dst lie, as far as they reach, in the same memory."""
    if torch.compiler.is_compiling() or not have_addresses([*src.tensors, *dst.tensors]):
        return False
    ranges = sorted(
        (*_range(tensor), is_dst)
        for is_dst, view in enumerate((src, dst))
        for tensor in view.tensors
    )
    reach = [0, 0]  # of either side's ranges so far
    for begin, end, is_dst in ranges:
        if begin < min(end, reach[1 - is_dst]):
            return True
        reach[is_dst] = max(reach[is_dst], end)
    return False


def check_apart(name: str, jobs: list[Job], src_ids: torch.Tensor, dst_ids: torch.Tensor) -> None:
    """Raise if a run reads a byte that it writes. Costs what it takes to list all runs."""
    src, dst = ([_runs(job, side, src_ids, dst_ids) for job in jobs] for side in range(2))
    begin, end = (np.concatenate(parts) for parts in zip(*src, strict=True))
    order = np.argsort(begin)
    begin, end = begin[order], np.maximum.accumulate(end[order])
    for dst_begin, dst_end in dst:
        # The last run of src that begins before this one ends: does it reach into it?
        last = np.searchsorted(begin, dst_end) - 1
        wrong = last >= 0
        wrong[wrong] = end[last[wrong]] > dst_begin[wrong]
        if wrong.any():
            address = int(dst_begin[np.argmax(wrong)])
            raise InvalidArgument(
                f"{name} must not share memory with the blocks that are read, got {address:#x} in "
                "both"
            )


def check_packed_apart(
    name: str, view: KVView, packed: torch.Tensor, block_ids: torch.Tensor
) -> None:
    """Raise if packed blocks lie in the memory of the cache's blocks.

    Of ids on a device, which are not looked at, in the memory between its first and its last.
    """
    if torch.compiler.is_compiling() or not have_addresses((packed, *view.tensors[:1])):
        return
    begin = packed.data_ptr()
    end = begin + packed.numel() * packed.element_size()
    begins, reach = _span(view)
    before = bisect_left(begins, end)  # of the tensors, as many begin before it ends
    if begin == end or before == 0 or reach[before - 1] <= begin:
        return
    if block_ids.device.type == "cpu":
        job = cast(Job, (SimpleNamespace(src=view, dst=view), view.gather_plan))
        run_begins, run_ends = _runs(job, 0, block_ids, block_ids)
        if not ((run_begins < end) & (run_ends > begin)).any():
            return
    raise InvalidArgument(
        f"{name} must not share memory with the cache's blocks, got {packed.numel()} elements at "
        f"{begin:#x} in both"
    )


def _span(view: KVView) -> tuple[list[int], list[int]]:
    """Return where the view's tensors begin, in order, and how far those up to each reach."""
    first = view.tensors[0].data_ptr()
    if view.span is None or view.span[0] != first:
        ranges = sorted(_range(tensor) for tensor in view.tensors)
        reach = np.maximum.accumulate([end for _, end in ranges]).tolist()
        view.span = (first, [begin for begin, _ in ranges], reach)
    return view.span[1], view.span[2]


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _runs(
    job: Job, side: int, src_ids: torch.Tensor, dst_ids: torch.Tensor
) -> tuple[np.ndarray, np.ndarray]:
    """Return where the runs of one side begin and end, of all pieces that are copied."""
    part, plan = job
    values = plan.values.numpy()
    view = (part.src, part.dst)[side]
    sides = [values[1 + k * SIDE_FIELDS :][:SIDE_FIELDS] for k in range(2)]
    ids = [src_ids.numpy().astype(np.int64), dst_ids.numpy().astype(np.int64)]
    num_pieces = min(i.size * s[2] for i, s in zip(ids, sides, strict=True))
    piece = np.arange(num_pieces)
    named = [i[piece // s[2]] for i, s in zip(ids, sides, strict=True)]
    # What is out of range is not copied either: whoever runs the job names it.
    copied = np.logical_and.reduce(
        [(i >= 0) & (i < s[0]) for i, s in zip(named, sides, strict=True)]
    )
    _, block_stride, pieces, piece_stride, slots, slot_stride = sides[side]
    at = named[side] // slots * block_stride + named[side] % slots * slot_stride
    at = (at + piece % pieces * piece_stride)[copied]
    axes = values[2 + 2 * SIDE_FIELDS : HEADER].reshape(MAX_AXES, 3)
    planes = values[HEADER:].reshape(-1, PLANE_FIELDS)[:, 2 * side : 2 * side + 2]
    bases = np.array([tensor.data_ptr() for tensor in view.tensors], dtype=np.int64)
    begin = (bases[planes[:, 0]] + planes[:, 1])[:, None] + at[None]
    for extent, *strides in axes:
        begin = begin[..., None] + np.arange(extent) * strides[side]
    run_elements = values[1 + 2 * SIDE_FIELDS] // part.src.layout.itemsize
    begin = begin.ravel()
    return begin, begin + run_elements * view.layout.itemsize
