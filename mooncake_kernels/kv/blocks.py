"""Blocks of one cache: gathered into a packed buffer, scattered from it, and their checksums."""

import torch

from .choose import choose
from .devices import bad_ids_on, device_of_call
from .execute import (
    BlockIds,
    Engine,
    add_checksums,
    as_ids,
    as_packed,
    check_call,
    check_engine,
    check_view,
    check_writable,
    execute,
)
from .overlap import check_packed_overlap
from .row_plan import whole_view
from .view import KVView


def gather_blocks(
    view: KVView,
    block_ids: BlockIds,
    out: torch.Tensor | None = None,
    *,
    max_sms: int | None = None,
    engine: Engine = "auto",
) -> torch.Tensor:
    """Copy the named blocks of a paged cache, in order, into one packed buffer.

    Equivalent to::

        for i, block_id in enumerate(block_ids):
            if block_id != -1:
                out[i] = view[block_id]

    Args:
        view: the cache.
        block_ids: ``[n]``, int32 or int64. Each in ``[0, view.num_blocks)``, or -1 for a hole,
            which leaves its row of ``out`` unchanged. Repeats are allowed.
        out: ``[n, layer, kv, head, token, dim]``, packed, of view's dtype, not overlapping it. On
            view's device; or one of the two on a GPU and the other in pinned host memory, which
            the GPU then writes or reads. None allocates it on view's device; rows of holes, and of
            bad ids on a GPU, are then undefined.
        max_sms: as for ``CopyPlan.run``.
        engine: as for ``CopyPlan.run``.

    Returns:
        ``out``: one buffer to send. On CUDA the copy is queued on the current stream.

    Raises:
        InvalidArgument: an argument is not as above. For ids on CUDA see ``CopyPlan.run``; here the
            next gather or scatter of this view raises, or ``view.check()``.
        Unavailable: the named engine is not available.
    """
    check_view("gather_blocks", view)
    check_call("gather_blocks", max_sms, engine)
    device = device_of_call(view, out)
    check_engine("gather_blocks", engine, device)
    if device.type == "cuda":
        other = out if isinstance(out, torch.Tensor) else view
        engine = choose(engine, view, other, [view.gather_plan], [block_ids])
    ids = as_ids("gather_blocks: block_ids", block_ids, device, engine, num_ids=view.num_blocks)
    shape = view.packed_shape(ids.numel())
    is_given = out is not None
    if out is None:
        out = torch.empty(shape, dtype=view.dtype, device=view.device)
    packed = as_packed("gather_blocks: out", out, shape, view, device)
    if is_given:
        check_packed_overlap("gather_blocks: out", view, out, ids)
    bad = view.bad_ids if device == view.device else bad_ids_on(view, device)
    execute(engine, view, packed, view.gather_plan, ids, None, bad, max_sms)
    return out


def scatter_blocks(
    packed: torch.Tensor,
    block_ids: BlockIds,
    view: KVView,
    *,
    max_sms: int | None = None,
    engine: Engine = "auto",
) -> None:
    """Copy packed blocks, in order, into the named blocks of a paged cache.

    Equivalent to::

        for i, block_id in enumerate(block_ids):
            if block_id != -1:
                view[block_id] = packed[i]

    Args:
        packed: ``[n, layer, kv, head, token, dim]``, packed, of view's dtype, on the devices that
            ``out`` of ``gather_blocks`` may have: its result, from a cache of any axis order.
        block_ids: ``[n]``, int32 or int64. Each in ``[0, view.num_blocks)``, or -1 to skip the
            row. The contents of a block that is named twice are undefined; this is not checked.
        view: the cache, which is written to.
        max_sms: as for ``CopyPlan.run``.
        engine: as for ``CopyPlan.run``.

    Raises:
        InvalidArgument: an argument is not as above; see ``gather_blocks``.
        Unavailable: the named engine is not available.
    """
    check_view("scatter_blocks", view)
    check_call("scatter_blocks", max_sms, engine)
    check_writable("scatter_blocks: view", view)
    device = device_of_call(view, packed)
    check_engine("scatter_blocks", engine, device)
    if device.type == "cuda":
        other = packed if isinstance(packed, torch.Tensor) else view
        engine = choose(engine, other, view, [view.scatter_plan], [block_ids])
    ids = as_ids("scatter_blocks: block_ids", block_ids, device, engine, num_ids=view.num_blocks)
    shape = view.packed_shape(ids.numel())
    source = as_packed("scatter_blocks: packed", packed, shape, view, device)
    check_packed_overlap("scatter_blocks: packed", view, packed, ids)
    bad = view.bad_ids if device == view.device else bad_ids_on(view, device)
    execute(engine, source, view, view.scatter_plan, None, ids, bad, max_sms)


def checksum_blocks(
    view: KVView,
    block_ids: BlockIds,
    *,
    max_sms: int | None = None,
    engine: Engine = "auto",
) -> torch.Tensor:
    """Return a 64-bit checksum of each named block of a paged cache.

    Equivalent to, modulo 2**64::

        for i, block_id in enumerate(block_ids):
            rows = view[block_id], packed as [layer, kv, head, token, dim], one row per token
            words = each row's bytes, 8 at a time, little endian, the last one zero-padded
            for index, word in enumerate(words):
                key = (index * 0x9e3779b97f4a7c15 + 0xd1b54a32d192ed03) | 1
                product = ((word ^ word >> 32) + 0x8cb92ba72f3d8dd7) * key
                sums[i] += product ^ product >> 32

    Blocks with equal contents have equal sums in caches of any two layouts. A single flipped bit is
    always detected, and almost surely any other change, including swapped rows. It detects
    faults, not forgery.

    Args:
        view: the cache.
        block_ids: ``[n]``, int32 or int64. Each in ``[0, view.num_blocks)``, or -1 for a hole,
            whose sum is 0.
        max_sms: as for ``CopyPlan.run``.
        engine: as for ``CopyPlan.run``; not "triton".

    Returns:
        int64 ``[n]`` on the cache's device. On CUDA it is queued on the current stream.

    Raises:
        InvalidArgument: an argument is not as above. For ids on CUDA see ``CopyPlan.run``; here the
            next call for this view raises, or ``view.check()``.
        Unavailable: the named engine is not available.
    """
    check_view("checksum_blocks", view)
    check_call("checksum_blocks", max_sms, engine)
    ids = as_ids("checksum_blocks: block_ids", block_ids, view.device, num_ids=view.num_blocks)
    sums = torch.zeros(ids.numel(), dtype=torch.int64, device=view.device)
    plan, bad = whole_view(view)
    add_checksums(engine, view, plan, ids, sums, bad, max_sms)
    return sums
