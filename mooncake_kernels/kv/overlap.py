"""Whether a copy reads what it writes; checked only for caches whose memory overlaps."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, product
from types import SimpleNamespace
from typing import cast

import torch

from ..bad_ids import SHARED
from ..errors import InvalidArgument
from .copy_parts import CopyPart, Job, are_one_cache
from .execute import Packed
from .layout import HEADER, MAX_AXES, PLANE_FIELDS, SIDE_FIELDS
from .view import KVView


def touch(src: KVView, dst: KVView) -> bool:
    """Tell whether the extents of a tensor of src and one of dst overlap in memory."""
    if torch.compiler.is_compiling() or not (src.has_addresses and dst.has_addresses):
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


def how_parts_meet(parts: Sequence[CopyPart]) -> tuple[bool, bool]:
    """Tell whether a part reads the cache that one writes, and whether two only share memory."""
    pairs = list(product(parts, parts))
    in_place = any(
        are_one_cache(part.src, other.dst)
        for part, other in pairs
        if part is not other or part.meets_itself
    )
    overlaps = any(
        touch(part.src, other.dst) and not are_one_cache(part.src, other.dst)
        for part, other in pairs
    )
    return in_place, overlaps


class OverlapCheck:
    """Refuses runs of these parts that read what they write.

    Attributes:
        is_needed: whether there may be such runs.
    """

    def __init__(self, parts: Sequence[CopyPart]):
        self._in_place, self._touch = how_parts_meet(parts)
        self.is_needed = self._in_place or self._touch

    def check(
        self,
        name: str,
        jobs: list[Job],
        src_ids: torch.Tensor,
        dst_ids: torch.Tensor,
        num_ids: int,
    ) -> torch.Tensor:
        """Refuse to read and write the same place; return dst's ids.

        For ids on a device the host does not wait. If there is such a place, it returns bad ids:
        the kernel then copies nothing and reports it.
        """
        if torch.compiler.is_compiling():
            return dst_ids
        kernel_ids = dst_ids
        if self._in_place:  # one cache: block sizes are equal
            is_shared = shared_ids(src_ids, dst_ids, num_ids)
            if dst_ids.device.type != "cpu":
                kernel_ids = unless_shared(kernel_ids, is_shared)
            elif is_shared.any():
                raise InvalidArgument(
                    f"{name} must not be among src's, for src and dst are one cache, got "
                    f"{dst_ids[is_shared][0]}"
                )
        if self._touch:
            begins, is_shared = shared_runs(jobs, src_ids, dst_ids)
            if dst_ids.device.type != "cpu":
                kernel_ids = unless_shared(kernel_ids, is_shared)
            elif is_shared.any():
                raise InvalidArgument(
                    f"{name} must not share memory with the blocks that are read, got "
                    f"{int(begins[is_shared][0]):#x} in both"
                )
        return kernel_ids


def shared_runs(
    jobs: list[Job], src_ids: torch.Tensor, dst_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find runs of dst that write what a run of src reads. Costs as much as listing all runs.

    For ids on a device, the host does not wait for it.

    Returns:
        The addresses at which the runs of dst begin, and for each, bool, whether it does.
    """
    src, dst = ([_runs(job, side, src_ids, dst_ids) for job in jobs] for side in range(2))
    (begin, end), (dst_begin, dst_end) = (
        [torch.cat(parts) for parts in zip(*of_side, strict=True)] for of_side in (src, dst)
    )
    if begin.numel() == 0:
        return dst_begin, torch.zeros_like(dst_begin, dtype=torch.bool)
    begin, order = begin.sort()
    reach = end[order].cummax(0).values
    # Does the last run of src that begins before this one ends reach into it?
    last = torch.searchsorted(begin, dst_end) - 1
    return dst_begin, (last >= 0) & (reach[last.clamp(min=0)] > dst_begin)


def shared_ids(src_ids: torch.Tensor, dst_ids: torch.Tensor, num_ids: int) -> torch.Tensor:
    """Tell for each of dst's ids whether it is also read, if both sides are one cache."""
    copied = (src_ids >= 0) & (dst_ids >= 0) & (src_ids < num_ids) & (dst_ids < num_ids)
    is_read = torch.zeros(num_ids + 1, dtype=torch.bool, device=src_ids.device)
    is_read.index_fill_(0, torch.where(copied, src_ids, num_ids).long(), True)
    return is_read[torch.where(copied, dst_ids, num_ids).long()] & copied


def unless_shared(dst_ids: torch.Tensor, is_shared: torch.Tensor) -> torch.Tensor:
    """Return dst's ids for a kernel: all bad if any memory is shared, so that nothing is copied.

    The kernel reports that. The host does not wait to learn whether any is shared.
    """
    return torch.where(is_shared.any(), SHARED, dst_ids)


def check_packed_overlap(name: str, view: KVView, packed: Packed, block_ids: torch.Tensor) -> None:
    """Raise if packed blocks are in the memory of the cache's blocks.

    For ids on a device, which are not read, in the memory from its first block to its last.
    """
    if torch.compiler.is_compiling() or not (packed.has_addresses and view.has_addresses):
        return
    [tensor] = packed.tensors
    begin = tensor.data_ptr()
    end = begin + tensor.numel() * tensor.element_size()
    if view.span is None or view.span[0] != view.tensors[0].data_ptr():
        view.span = _span(view)
    _, begins, reach = view.span
    before = bisect_left(begins, end)  # number of tensors that begin before it ends
    if begin == end or before == 0 or reach[before - 1] <= begin:
        return
    if block_ids.device.type == "cpu":
        job = cast(Job, (SimpleNamespace(src=view, dst=view), view.packed.gather_plan))
        run_begins, run_ends = _runs(job, 0, block_ids, block_ids)
        if not ((run_begins < end) & (run_ends > begin)).any():
            return
    raise InvalidArgument(
        f"{name} must not share memory with the cache's blocks, got {tensor.numel()} elements at "
        f"{begin:#x} in both"
    )


def _span(view: KVView) -> tuple[int, list[int], list[int]]:
    """Return the first tensor's address, where all begin, in order, and the furthest end so far."""
    ranges = sorted(_range(tensor) for tensor in view.tensors)
    reach = list(accumulate((end for _, end in ranges), max))
    return view.tensors[0].data_ptr(), [begin for begin, _ in ranges], reach


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    if tensor.numel() == 0:
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _runs(
    job: Job, side: int, src_ids: torch.Tensor, dst_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where the runs of one side begin and end; -1 for what is not copied."""
    part, plan = job
    values = plan.values
    view = (part.src, part.dst)[side]
    sides = [values[1 + k * SIDE_FIELDS :][:SIDE_FIELDS].tolist() for k in range(2)]
    ids = [src_ids.long(), dst_ids.long()]
    num_pieces = min(i.numel() * s[2] for i, s in zip(ids, sides, strict=True))
    piece = torch.arange(num_pieces, device=src_ids.device)
    named = [i[piece // s[2]] for i, s in zip(ids, sides, strict=True)]
    # Ids out of range are not copied either: the job's run names them.
    in_range = [(i >= 0) & (i < s[0]) for i, s in zip(named, sides, strict=True)]
    copied = in_range[0] & in_range[1]
    _, block_stride, pieces, piece_stride, slots, slot_stride = sides[side]
    block = torch.where(copied, named[side], 0)
    at = block // slots * block_stride + block % slots * slot_stride
    at += piece % pieces * piece_stride
    axes = values[2 + 2 * SIDE_FIELDS : HEADER].reshape(MAX_AXES, 3).tolist()
    planes = values[HEADER:].reshape(-1, PLANE_FIELDS)[:, 2 * side : 2 * side + 2].tolist()
    of_planes = [view.tensors[index].data_ptr() + offset for index, offset in planes]
    # One by one: numbers that the host sends to a device would be waited for.
    begin = torch.stack([at + first for first in of_planes]) if of_planes else at[None, :0]
    is_run = copied[None, : begin.shape[1]].expand_as(begin)
    for extent, *strides in axes:
        begin = begin[..., None] + torch.arange(extent, device=at.device) * strides[side]
        is_run = is_run[..., None].expand_as(begin)
    run_elements = int(values[1 + 2 * SIDE_FIELDS]) // part.src.layout.itemsize
    end = torch.where(is_run, begin + run_elements * view.layout.itemsize, -1)
    return torch.where(is_run, begin, -1).flatten(), end.flatten()
