"""Paged KV movement: blocks of one cache into blocks of another, whatever the two layouts.

The axes of a cache are named, never guessed from shapes: two layouts can have the same shape and
mean different things. A ``CopyPlan`` is made once for a pair of caches and run many times; a run
costs host work in the number of blocks, not in blocks x layers x heads.

On the CPU copies run on torch's threads, which do not survive a ``fork()``: as after any parallel
torch call, a child that is forked later must not copy. Autograd does not see a copy.
"""

import operator
from collections.abc import Sequence

import torch

from ._bad_ids import BadIds
from ._kv_execute import (
    BlockIds,
    Engine,
    as_ids,
    as_packed,
    check_call,
    check_writable,
    execute,
)
from ._kv_view import BlockPlan, KVView
from ._layout import Selection
from .errors import InvalidArgument

__all__ = ["CopyPlan", "KVView", "gather_blocks", "scatter_blocks"]


class CopyPlan:
    """Copy blocks of one view into blocks of another of any axis order.

    Equivalent to::

        for src_block, dst_block in zip(src_blocks, dst_blocks):
            if src_block == -1 or dst_block == -1:
                continue
            for layer in layers:
                for kv in range(num_kv):
                    dst[layer, kv, dst_block, dst_heads] = src[layer, kv, src_block, src_heads]

    Args:
        src: what is read.
        dst: what is written, of the same dtype, device, block size, head dimension and number of
            kv. It may be the same cache as ``src``; then no block may be both read and written.
        layers: which layers to copy, the same numbers on both sides; None for all, and then both
            sides must have equally many.
        src_heads, dst_heads: a slice of the heads of each side, equally long: how a cache of one
            tensor-parallel size is copied into one of another. None for all.

    Raises:
        InvalidArgument: the two views do not fit; the message names the argument.
    """

    def __init__(
        self,
        src: KVView,
        dst: KVView,
        *,
        layers: slice | Sequence[int] | None = None,
        src_heads: slice | None = None,
        dst_heads: slice | None = None,
    ):
        for name, view in (("src", src), ("dst", dst)):
            if not isinstance(view, KVView):
                raise InvalidArgument(
                    f"CopyPlan: {name} must be a KVView, got {type(view).__name__}"
                )
        for name in ("dtype", "device", "block_size", "head_dim", "num_kv"):
            mine, other = getattr(src, name), getattr(dst, name)
            if mine != other:
                raise InvalidArgument(f"CopyPlan: dst must have src's {name} {mine}, got {other}")
        check_writable("CopyPlan: dst", dst)
        self.src, self.dst = src, dst
        self._layers = _choose_layers("CopyPlan", layers, src.num_layers, dst.num_layers)
        src_head, num_heads = _choose_heads("src_heads", src_heads, src.num_heads)
        dst_head, num_dst_heads = _choose_heads("dst_heads", dst_heads, dst.num_heads)
        if num_heads != num_dst_heads:
            raise InvalidArgument(
                f"CopyPlan: dst_heads must be as many as src_heads ({num_heads}), "
                f"got {num_dst_heads}"
            )
        self._heads = (src_head, dst_head, num_heads)
        self._plans: dict[tuple[int, ...], BlockPlan] = {}
        self._all = self._plan(self._layers)
        names = ("copy_blocks: src_blocks", "copy_blocks: dst_blocks")
        self._bad = BadIds(src.device, names, (src.num_blocks, dst.num_blocks))

    def run(
        self,
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        *,
        layers: slice | Sequence[int] | None = None,
        max_sms: int | None = None,
        engine: Engine = "auto",
    ) -> None:
        """Copy block ``src_blocks[i]`` of src into block ``dst_blocks[i]`` of dst.

        On CUDA the copy is queued on the current stream and may not have run yet. Ids given on the
        CPU are moved to the device first; hand them over there to save that. Those in pinned
        memory must stay as they are until the stream has come that far.

        Args:
            src_blocks: ``[n]``, int32 or int64. Each in ``[0, src.num_blocks)``, or -1 to skip the
                pair. Repeats are allowed.
            dst_blocks: ``[n]``, likewise for dst. What a block holds that is named twice is not
                defined: it may be a mixture of its sources. This is not checked.
            layers: copy only these of the plan's layers, by their numbers in the views (a slice
                takes those of the plan that are in it); None for all of them.
            max_sms: use at most this many multiprocessors; None for all. Ignored on the CPU, not
                to be had from engine "triton".
            engine: "host" (CPU tensors), "cuda" or "triton" (CUDA tensors; triton also runs on the
                CPU in its interpreter), "reference"; "auto" is host or cuda. A named engine never
                falls back.

        Raises:
            InvalidArgument: an id is out of range, or an argument is not as above. On the CPU
                nothing has been copied then. On CUDA, and in Triton's interpreter, the ids are
                checked by the kernel: pairs with a bad id are skipped, and the error is raised by
                the next ``run`` that finds it there, or by ``check``. Under torch.compile it is a
                plain ValueError.
            Unavailable: the named engine is not here.
            CudaError: CUDA refused the launch.
        """
        check_call("copy_blocks", self.src, max_sms)
        plan = self._all if layers is None else self._plan(self._subset(layers))
        src_ids = as_ids("copy_blocks: src_blocks", src_blocks, self.src.device)
        dst_ids = as_ids("copy_blocks: dst_blocks", dst_blocks, self.dst.device)
        if src_ids.numel() != dst_ids.numel():
            raise InvalidArgument(
                f"copy_blocks: dst_blocks must have as many ids as src_blocks "
                f"({src_ids.numel()}), got {dst_ids.numel()}"
            )
        execute(engine, self.src, self.dst, plan, src_ids, dst_ids, self._bad, max_sms)

    def check(self) -> None:
        """Wait for the current stream and raise if a run met a bad id. Does nothing on the CPU.

        Raises:
            InvalidArgument: an id of an earlier run was out of range; the message names it.
        """
        if self.src.device.type == "cuda":
            torch.cuda.current_stream(self.src.device).synchronize()
        self._bad.raise_if_any()

    def _plan(self, layers: tuple[int, ...]) -> BlockPlan:
        if layers not in self._plans:
            selection = Selection([(i, i) for i in layers], self.src.num_kv, *self._heads)
            self._plans[layers] = BlockPlan(self.src.layout, self.dst.layout, selection)
        return self._plans[layers]

    def _subset(self, layers: slice | Sequence[int]) -> tuple[int, ...]:
        if isinstance(layers, slice):
            chosen = _choose_layers("copy_blocks", layers, self.src.num_layers, self.dst.num_layers)
            return tuple(layer for layer in self._layers if layer in chosen)
        numbers = _as_numbers("copy_blocks", layers)
        for layer in numbers:
            if layer not in self._layers:
                raise InvalidArgument(
                    f"copy_blocks: layers must be among the plan's {list(self._layers)}, "
                    f"got {layer}"
                )
        return numbers


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
            which leaves its row of ``out`` as it was. Repeats are allowed.
        out: ``[n, layer, kv, head, token, dim]``, packed, of view's dtype and device, not
            overlapping it. Made if None, and then undefined where ``block_ids`` has holes.
        max_sms: as for ``CopyPlan.run``.
        engine: as for ``CopyPlan.run``.

    Returns:
        ``out``: one buffer to send. On CUDA the copy is queued on the current stream.

    Raises:
        InvalidArgument: an argument is not as above. About ids on CUDA see ``CopyPlan.run``; here
            it is the next gather or scatter of this view that raises.
        Unavailable: the named engine is not here.
    """
    check_call("gather_blocks", view, max_sms)
    ids = as_ids("gather_blocks: block_ids", block_ids, view.device)
    shape = view.packed_shape(ids.numel())
    if out is None:
        out = torch.empty(shape, dtype=view.dtype, device=view.device)
    packed = as_packed("gather_blocks: out", out, shape, view)
    execute(engine, view, packed, view.gather_plan, ids, None, view.bad_ids, max_sms)
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
        packed: ``[n, layer, kv, head, token, dim]``, packed, of view's dtype and device: what
            ``gather_blocks`` made, of a cache of any axis order.
        block_ids: ``[n]``, int32 or int64. Each in ``[0, view.num_blocks)``, or -1 for a row that
            is not wanted. What a block holds that is named twice is not defined; this is not
            checked.
        view: the cache, which is written to.
        max_sms: as for ``CopyPlan.run``.
        engine: as for ``CopyPlan.run``.

    Raises:
        InvalidArgument: an argument is not as above; see ``gather_blocks``.
        Unavailable: the named engine is not here.
    """
    check_call("scatter_blocks", view, max_sms)
    check_writable("scatter_blocks: view", view)
    ids = as_ids("scatter_blocks: block_ids", block_ids, view.device)
    source = as_packed("scatter_blocks: packed", packed, view.packed_shape(ids.numel()), view)
    execute(engine, source, view, view.scatter_plan, None, ids, view.bad_ids, max_sms)


def _as_numbers(op: str, layers: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(layer) for layer in layers)
    except TypeError:
        raise InvalidArgument(
            f"{op}: layers must be a slice or a list of integers, got {layers!r}"
        ) from None


def _choose_layers(
    op: str, layers: slice | Sequence[int] | None, num_src: int, num_dst: int
) -> tuple[int, ...]:
    if layers is None and num_src != num_dst:
        raise InvalidArgument(f"{op}: dst must have src's {num_src} layers, got {num_dst}")
    num_layers = min(num_src, num_dst)
    if layers is None:
        return tuple(range(num_layers))
    if isinstance(layers, slice):
        return tuple(range(*_indices(op, "layers", layers, num_layers)))
    numbers = _as_numbers(op, layers)
    for layer in numbers:
        if not 0 <= layer < num_layers:
            raise InvalidArgument(f"{op}: layers must be in [0, {num_layers}), got {layer}")
    return numbers


def _choose_heads(name: str, heads: slice | None, num_heads: int) -> tuple[int, int]:
    """Return (first head, number of heads)."""
    if heads is None:
        return 0, num_heads
    if not isinstance(heads, slice):
        raise InvalidArgument(f"CopyPlan: {name} must be a slice or None, got {heads!r}")
    first, stop, step = _indices("CopyPlan", name, heads, num_heads)
    ends = [end for end in (heads.start, heads.stop) if end is not None]
    if step != 1 or first >= stop or not all(-num_heads <= end <= num_heads for end in ends):
        raise InvalidArgument(
            f"CopyPlan: {name} must be a slice of at least one of {num_heads} heads with step 1, "
            f"got {heads}"
        )
    return first, stop - first


def _indices(op: str, name: str, chosen: slice, size: int) -> tuple[int, int, int]:
    try:
        return chosen.indices(size)
    except (TypeError, ValueError):  # not integers; a step of 0
        raise InvalidArgument(
            f"{op}: {name} must be a slice of integers with a step, got {chosen}"
        ) from None
