"""Blocks of one cache: gathered into a packed buffer, scattered from it, and their checksums."""

import torch

from ..errors import InvalidArgument
from .choose import choose
from .devices import bad_ids_on
from .execute import (
    BlockIds,
    Engine,
    Packed,
    add_checksums,
    as_ids,
    as_packed,
    check_call,
    check_engine,
    execute,
)
from .overlap import check_packed_overlap
from .row_plan import whole_view
from .view import KVView, PackedBlocks


def gather_blocks(
    view: KVView,
    block_ids: BlockIds,
    out: torch.Tensor | None = None,
    *,
    axes: str | None = None,
    max_sms: int | None = None,
    engine: Engine = "auto",
) -> torch.Tensor:
    """Copy the named blocks of a paged cache, in order, into one packed buffer.

    Equivalent to::

        for i, block_id in enumerate(block_ids):
            if block_id != -1:
                out[i] = view[block_id], with its axes in the order of ``axes``

    Args:
        view: the cache.
        block_ids: ``[n]``, int32 or int64. Each in ``[0, view.num_blocks)``, or -1 for a hole,
            which leaves its row of ``out`` unchanged. Repeats are allowed.
        out: ``view.packed_shape(n, axes)``, packed, of view's dtype, not overlapping it. On
            view's device; or one of the two on a GPU and the other in pinned host memory, which
            the GPU then writes or reads. None allocates it on view's device; rows of holes, and of
            bad ids on a GPU, are then undefined.
        axes: of a packed block: layer, kv, head, token and dim in any order, dim last. None keeps
            the cache's own, ``view.packed_axes``, which is the fastest. Name them for a receiver
            whose cache has another order, and give the same to ``scatter_blocks``.
        max_sms: as for ``CopyPlan.run``.
        engine: as for ``CopyPlan.run``.

    Returns:
        ``out``: one buffer to send. On CUDA the copy is queued on the current stream.

    Raises:
        InvalidArgument: an argument is not as above. For ids on CUDA see ``CopyPlan.run``; here the
            next gather or scatter of this view raises, or ``view.check()``.
        Unavailable: the named engine is not available.
    """
    begun = _begin("gather_blocks", view, out, block_ids, axes, max_sms, engine)
    blocks, device, gpu, engine, ids = begun
    if out is None:
        out = torch.empty((ids.numel(), *blocks.sizes), dtype=view.dtype, device=view.device)
        is_real = type(out) is torch.Tensor and not torch.compiler.is_compiling()
        base = out.data_ptr() if is_real else None
        if base == 0 and out.numel():
            raise InvalidArgument("gather_blocks: out must have memory, got a tensor without any")
        packed = Packed(out, base, blocks.axes)
    else:
        packed = as_packed("gather_blocks: out", out, ids.numel(), view, blocks, device)
        check_packed_overlap("gather_blocks: out", view, packed, ids)
    bad = view.bad_ids if gpu == view.gpu else bad_ids_on(view, device)
    execute(engine, view, packed, blocks.gather_plan, ids, None, bad, max_sms, gpu)
    return out


def scatter_blocks(
    packed: torch.Tensor,
    block_ids: BlockIds,
    view: KVView,
    *,
    axes: str | None = None,
    max_sms: int | None = None,
    engine: Engine = "auto",
) -> None:
    """Copy packed blocks, in order, into the named blocks of a paged cache.

    Equivalent to::

        for i, block_id in enumerate(block_ids):
            if block_id != -1:
                view[block_id] = packed[i], whose axes are in the order of ``axes``

    Args:
        packed: ``view.packed_shape(n, axes)``, packed, of view's dtype, on the devices that
            ``out`` of ``gather_blocks`` may have: its result.
        block_ids: ``[n]``, int32 or int64. Each in ``[0, view.num_blocks)``, or -1 to skip the
            row. The contents of a block that is named twice are undefined; this is not checked.
        view: the cache, which is written to.
        axes: of a packed block. None for ``view.packed_axes``; for blocks that were gathered from
            a cache of another order, that one's.
        max_sms: as for ``CopyPlan.run``.
        engine: as for ``CopyPlan.run``.

    Raises:
        InvalidArgument: an argument is not as above; see ``gather_blocks``.
        Unavailable: the named engine is not available.
    """
    begun = _begin("scatter_blocks", view, packed, block_ids, axes, max_sms, engine)
    blocks, device, gpu, engine, ids = begun
    source = as_packed("scatter_blocks: packed", packed, ids.numel(), view, blocks, device)
    check_packed_overlap("scatter_blocks: packed", view, source, ids)
    bad = view.bad_ids if gpu == view.gpu else bad_ids_on(view, device)
    execute(engine, source, view, blocks.scatter_plan, None, ids, bad, max_sms, gpu)


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
    if not isinstance(view, KVView):
        raise _no_view("checksum_blocks", view)
    if max_sms is not None or type(engine) is not str or engine != "auto":
        check_call("checksum_blocks", max_sms, engine)
    ids = as_ids("checksum_blocks: block_ids", block_ids, view.device, num_ids=view.num_blocks)
    sums = torch.zeros(ids.numel(), dtype=torch.int64, device=view.device)
    plan, bad = whole_view(view)
    add_checksums(engine, view, plan, ids, sums, bad, max_sms)
    return sums


def _begin(
    op: str,
    view: KVView,
    packed: torch.Tensor | None,
    block_ids: BlockIds,
    axes: str | None,
    max_sms: int | None,
    engine: Engine,
) -> tuple[PackedBlocks, torch.device, int, Engine, torch.Tensor]:
    """Check a gather or a scatter, except for its packed side.

    Returns:
        Its packed form, where it runs, the index of that GPU (-1 for the CPU), the engine and the
        ids.
    """
    if not isinstance(view, KVView):
        raise _no_view(op, view)
    if max_sms is not None or type(engine) is not str or engine != "auto":
        check_call(op, max_sms, engine)
    gathers = op == "gather_blocks"
    blocks = view.packed if axes is None else view.packed_as(op, axes)
    if not gathers:
        view.check_writable(f"{op}: view")
    device, gpu = view.device, view.gpu
    if gpu < 0 and isinstance(packed, torch.Tensor) and packed.is_cuda:
        device, gpu = packed.device, packed.get_device()
    if engine != "auto":
        check_engine(op, engine, device)
    if gpu >= 0:
        other = packed if isinstance(packed, torch.Tensor) else view
        src, dst = (view, other) if gathers else (other, view)
        plan = blocks.gather_plan if gathers else blocks.scatter_plan
        engine = choose(engine, src, dst, [plan], [block_ids])
    ids = as_ids(f"{op}: block_ids", block_ids, device, engine, num_ids=view.num_blocks)
    return blocks, device, gpu, engine, ids


def _no_view(op: str, view: object) -> InvalidArgument:
    return InvalidArgument(f"{op}: view must be a KVView, got {type(view).__name__}")
