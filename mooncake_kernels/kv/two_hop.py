"""Engine "two_hop": a kernel, a staging buffer on the GPU, and a few large copies."""

from dataclasses import replace

import torch

from ..errors import InvalidArgument
from .execute_listed import CHECK, COUNT, EACH, Ids, Place, copy_by_kernel, copy_listed
from .layout import SIDE_FIELDS, Layout, Selection
from .view import BlockPlan

HOLE = -1
STAGING_BYTES = 64 << 20  # at most; the next gather waits until these were sent
MIN_COPY_BYTES = 32 << 10  # on average: shorter copies over PCIe take as long as this


class TwoHops:
    """The two copies: into the buffer, and out of it.

    The buffer has the layout of the host's side, but holds only what is copied, so what is
    contiguous there is contiguous in it.

    Args:
        plan: the copy in one step.
        to_host: whether dst is the host's side.
        num_blocks: how many the buffer has room for.
        num_packed: blocks of a side without ids.
    """

    def __init__(self, plan: BlockPlan, to_host: bool, num_blocks: int, num_packed: list[int]):
        src, dst = (
            replace(layout, sizes=layout.sizes | {"block": count}) if count else layout
            for layout, count in zip(plan.layouts, num_packed, strict=True)
        )
        chosen = plan.selection
        layers = list(enumerate(chosen.layers))
        staging = staging_layout(dst if to_host else src, chosen, num_blocks)
        into = replace(chosen, layers=[(of_src, i) for i, (of_src, _) in layers], dst_head=0)
        out_of = replace(chosen, layers=[(i, of_dst) for i, (_, of_dst) in layers], src_head=0)
        self.into = BlockPlan(src, staging, into)
        self.out_of = BlockPlan(staging, dst, out_of)


class Buffer:
    """The staging buffer; or, without memory, a base for offsets only."""

    def __init__(self, memory: torch.Tensor | None = None):
        self.registered: list[torch.Tensor] = []
        self.base = 0 if memory is None else memory.data_ptr()


def copy_in_two_hops(
    plan: BlockPlan,
    src: Place,
    dst: Place,
    src_ids: Ids,
    dst_ids: Ids,
    bad_address: int,
    max_sms: int,
    gpu: int,
    *,
    to_host: bool,
    staging_bytes: int = STAGING_BYTES,
    min_copy_bytes: int = MIN_COPY_BYTES,
) -> None:
    """Copy, a bufferful at a time; the ids are on the CPU. Without a GPU (-1) it is a test."""
    _check_sides(plan)
    copy_listed(plan, src, dst, src_ids, dst_ids, CHECK, gpu)
    pairs = _pairs(src_ids, dst_ids)
    num_pairs = pairs[0].numel()
    if num_pairs == 0:
        return
    block_bytes = _bytes_per_id(plan)
    num_blocks = min(num_pairs, max(1, staging_bytes // block_bytes))
    hops = _hops(plan, to_host, num_blocks, (src_ids, dst_ids))
    if to_host:
        count = copy_listed(hops.out_of, Buffer(), dst, None, pairs[1], COUNT, gpu)
    else:
        count = copy_listed(hops.into, src, Buffer(), pairs[0], None, COUNT, gpu)
    _check_contiguous("dst" if to_host else "src", count, num_pairs * block_bytes, min_copy_bytes)
    device = torch.device("cuda", gpu) if gpu >= 0 else torch.device("cpu")
    # From torch's allocator for the current stream: it is reused only after the work queued here.
    memory = torch.empty(num_blocks * block_bytes, dtype=torch.uint8, device=device)
    buffer, numbers = Buffer(memory), (bad_address, max_sms, gpu)
    for some_src, some_dst in zip(*(ids.split(num_blocks) for ids in pairs), strict=True):
        if to_host:
            there = some_src.to(device, non_blocking=True)
            copy_by_kernel(hops.into, src, buffer, there, None, *numbers)
            copy_listed(hops.out_of, buffer, dst, None, some_dst, EACH, gpu)
        else:
            there = some_dst.to(device, non_blocking=True)
            copy_listed(hops.into, src, buffer, some_src, None, EACH, gpu)
            copy_by_kernel(hops.out_of, buffer, dst, None, there, *numbers)


def takes(plan: BlockPlan, to_host: bool) -> bool:
    """Tell whether the host's side is contiguous enough in each block, whatever the ids."""
    layouts, chosen = plan.layouts, plan.selection
    if chosen.by_slot or layouts[0].sizes["token"] != layouts[1].sizes["token"]:
        return False
    hops = TwoHops(plan, to_host, 1, [0, 0])
    outer = hops.out_of if to_host else hops.into
    return int(outer.values[1 + 2 * SIDE_FIELDS]) >= MIN_COPY_BYTES


def staging_layout(host: Layout, chosen: Selection, num_blocks: int) -> Layout:
    """Return what is copied, packed, with its axes in the order of the host's side."""
    sizes = host.sizes | {
        "layer": len(chosen.layers),
        "kv": chosen.num_kv,
        "head": chosen.num_heads,
        "block": num_blocks,
    }
    axes = [axis for axis in sizes if axis != "dim"]
    # The tensors of a list are separate: outermost.
    axes.sort(key=lambda axis: (host.is_list(axis), host.strides[axis]))
    strides, step = {"dim": host.itemsize}, sizes["dim"] * host.itemsize
    for axis in axes:
        strides[axis] = step
        step *= sizes[axis]
    return Layout(sizes, strides, host.itemsize, ((0,),))


def _check_sides(plan: BlockPlan) -> None:
    sizes = [layout.sizes["token"] for layout in plan.layouts]
    if plan.selection.by_slot:
        raise InvalidArgument("engine two_hop must be given blocks (CopyPlan.run), got slots")
    if sizes[0] != sizes[1]:
        raise InvalidArgument(
            f"engine two_hop must be given sides of one block_size, got {sizes[0]} and {sizes[1]}"
        )


def _check_contiguous(name: str, count: int, num_bytes: int, min_copy_bytes: int) -> None:
    if count > 1 and num_bytes // count < min_copy_bytes:
        raise InvalidArgument(
            f"engine two_hop: {name} must be contiguous in host memory over {min_copy_bytes} bytes "
            f"at a time, got {count} ranges of {num_bytes // count} bytes on average (engine cuda "
            "takes these)"
        )


def _hops(plan: BlockPlan, to_host: bool, num_blocks: int, ids: tuple[Ids, Ids]) -> TwoHops:
    """Return the two copies; cached from the last call, because the next is often alike."""
    given = max(one.numel() for one in ids if one is not None)
    num_packed = [given if one is None else 0 for one in ids]
    key = (to_host, num_blocks, *num_packed)
    if plan.hops is None or plan.hops[0] != key:
        plan.hops = (key, TwoHops(plan, to_host, num_blocks, num_packed))
    return plan.hops[1]


def _pairs(src_ids: Ids, dst_ids: Ids) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both sides' ids without holes; a side without ids takes its blocks in order."""
    given = src_ids if src_ids is not None else dst_ids
    assert given is not None, "one side has ids"
    in_order = torch.arange(given.numel(), device="cpu")
    src, dst = (in_order if ids is None else ids for ids in (src_ids, dst_ids))
    kept = (src != HOLE) & (dst != HOLE)
    return src[kept], dst[kept]


def _bytes_per_id(plan: BlockPlan) -> int:
    chosen, sizes = plan.selection, plan.layouts[0].sizes
    rows = len(chosen.layers) * chosen.num_kv * chosen.num_heads * sizes["token"]
    return rows * sizes["dim"] * plan.layouts[0].itemsize
