"""The geometry of a copy between two paged layouts: what is contiguous, what is strided.

Pure arithmetic on sizes and strides: no memory is accessed here.
"""

import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import gcd

from .._tensors import rows_meet, shared_step
from ..errors import InvalidArgument, shown


def shard_heads(
    num_heads: int, src: tuple[int, int], dst: tuple[int, int]
) -> tuple[slice, slice] | None:
    """Say which heads of one tensor-parallel rank's cache go into which of another's.

    Rank r of s holds heads ``[r * num_heads // s, (r + 1) * num_heads // s)`` of the model; with
    more ranks than heads (GQA, MQA) each head is held by ``s // num_heads`` ranks in a row.
    Equivalent to::

        overlap = [head for head in held(*src) if head in held(*dst)]
        src_heads = slice of overlap within held(*src), dst_heads = the same within held(*dst)

    A rank of dst gets all its heads from the ranks of src for which this is not None; among ranks
    that hold the same heads, one is enough.

    Args:
        num_heads: KV heads of the model.
        src: (rank, number of ranks). The number divides ``num_heads``, or is a multiple of it.
        dst: likewise.

    Returns:
        ``(src_heads, dst_heads)`` for ``CopyPlan``; None if the two have no head in common.

    Raises:
        InvalidArgument: a rank or a number of ranks is not as above.
    """
    if not isinstance(num_heads, numbers.Integral) or num_heads < 1:
        raise InvalidArgument(f"shard_heads: num_heads must be an integer >= 1, got {num_heads!r}")
    src_first, src_stop = _held_heads("src", num_heads, src)
    dst_first, dst_stop = _held_heads("dst", num_heads, dst)
    first, stop = max(src_first, dst_first), min(src_stop, dst_stop)
    if first >= stop:
        return None
    return slice(first - src_first, stop - src_first), slice(first - dst_first, stop - dst_first)


def _held_heads(name: str, num_heads: int, shard: tuple[int, int]) -> tuple[int, int]:
    try:
        rank, num_ranks = (operator.index(number) for number in shard)
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"shard_heads: {name} must be (rank, number of ranks), got {shard!r}"
        ) from None
    if not 0 <= rank < num_ranks:
        raise InvalidArgument(
            f"shard_heads: {name} must have a rank in [0, {num_ranks}), got {rank}"
        )
    if num_heads % num_ranks and num_ranks % num_heads:
        raise InvalidArgument(
            f"shard_heads: {name} must have a number of ranks that divides {num_heads} heads or "
            f"is a multiple of them, got {num_ranks}"
        )
    first = rank * num_heads // num_ranks
    return first, first + max(1, num_heads // num_ranks)


def as_pairs(op: str, layers: Sequence[int | tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return (layer of src, layer of dst) pairs; a single number is used for both."""
    pairs = []
    try:
        for layer in layers:
            src, dst = layer if isinstance(layer, (tuple, list)) else (layer, layer)
            pairs.append((operator.index(src), operator.index(dst)))
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"{op}: layers must be a slice or a list of integers or pairs of them, got {layers!r}"
        ) from None
    return tuple(pairs)


def choose_layers(
    op: str, layers: slice | Sequence[int | tuple[int, int]] | None, num_src: int, num_dst: int
) -> tuple[tuple[int, int], ...]:
    """Return (layer of src, layer of dst) pairs."""
    if layers is None and num_src != num_dst:
        raise InvalidArgument(f"{op}: dst must have src's {num_src} layers, got {num_dst}")
    num_layers = min(num_src, num_dst)
    if layers is None:
        return tuple((i, i) for i in range(num_layers))
    if isinstance(layers, slice):
        return tuple((i, i) for i in range(*_indices(op, "layers", layers, num_layers)))
    pairs = as_pairs(op, layers)
    for src, dst in pairs:
        for layer, count in ((src, num_src), (dst, num_dst)):
            if not 0 <= layer < count:
                raise InvalidArgument(f"{op}: layers must be in [0, {count}), got {layer}")
    check_written_once(op, pairs)
    return pairs


def check_written_once(op: str, pairs: Sequence[tuple[int, int]]) -> None:
    """Refuse two layers with one destination, whose contents would be undefined."""
    written = [dst for _, dst in pairs]
    if len(set(written)) < len(written):
        twice = next(layer for layer in written if written.count(layer) > 1)
        raise InvalidArgument(f"{op}: layers must name a layer of dst once, got {twice} twice")


def choose_heads(name: str, heads: slice | None, num_heads: int) -> tuple[int, int]:
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
            f"{op}: {name} must be a slice of integers with a step other than 0, got {chosen}"
        ) from None


AXES = ("layer", "kv", "block", "head", "token", "dim")
PACKED_AXES = ("layer", "kv", "head", "token", "dim")  # of a packed block; in this order in docs
# The operator's plan, as described in csrc/ops/copy_plan.h: whether ids are slots, SIDE_FIELDS
# numbers for src and for dst, run_bytes, MAX_AXES x (extent, strides), and PLANE_FIELDS numbers per
# plane, or RESOLVED_FIELDS once it contains addresses.
MAX_AXES = 2
SIDE_FIELDS = 6
HEADER = 2 + 2 * SIDE_FIELDS + 3 * MAX_AXES
PLANE_FIELDS = 4
RESOLVED_FIELDS = 2


def parse_axes(axes: str, num_dims: int) -> tuple[str, ...]:
    """Split an axes string such as ``"kv block token head dim"`` and check it."""
    if not isinstance(axes, str):
        raise InvalidArgument(
            f"KVView: axes must be names in one str, as 'block token dim', got {shown(axes, 80)}"
        )
    names = tuple(axes.split())
    unknown = [name for name in names if name not in AXES]
    repeated = [name for name in names if names.count(name) > 1]
    if not names or unknown or repeated:
        problem = f"{(unknown + repeated)[0]!r} in " if names else ""
        raise InvalidArgument(
            f"KVView: axes must name each of {', '.join(AXES)} at most once, got {problem}{axes!r}"
        )
    if len(names) != num_dims:
        raise InvalidArgument(
            f"KVView: axes must have one name for each of the tensor's {num_dims} dimensions, "
            f"got {axes!r}"
        )
    missing = [name for name in ("block", "dim") if name not in names]
    if missing:
        raise InvalidArgument(f"KVView: axes must contain {missing[0]!r}, got {axes!r}")
    if names[-1] != "dim":
        raise InvalidArgument(f"KVView: axes must end in 'dim', got {axes!r}")
    return names


@dataclass(frozen=True)
class Layout:
    """The place of every element of a view: ``sizes`` in elements, ``strides`` in bytes.

    An axis that the view does not have has size 1 and stride 0. ``tensors[kv][layer]`` is
    (index of the tensor, byte offset in it) for views of several tensors; for an axis inside a
    tensor the table has one entry, and the stride gives the rest.
    """

    sizes: dict[str, int]
    strides: dict[str, int]
    itemsize: int
    tensors: tuple[tuple[int, ...], ...]  # [kv][layer] -> tensor, for axes that are lists

    def plane(self, kv: int, layer: int) -> tuple[int, int]:
        """Return (tensor, byte offset) of one layer's k or v."""
        row = self.tensors[kv if len(self.tensors) > 1 else 0]
        tensor = row[layer if len(row) > 1 else 0]
        return tensor, kv * self.strides["kv"] + layer * self.strides["layer"]

    def shared_step(self) -> str | None:
        """Tell which axis of a tensor steps into the elements of those inside it, if one does."""
        axes = self._axes_around_rows()
        strides = [self.strides[axis] // self.itemsize for axis in axes]
        return shared_step(strides, [self.sizes[axis] for axis in axes], axes, self.sizes["dim"])

    def tensors_meet(self, distance: int) -> bool:
        """Tell whether tensors so far apart share elements; none may have a shared step."""
        axes, row_bytes = self._axes_around_rows(), self.sizes["dim"] * self.itemsize
        sizes, steps = ([lengths[axis] for axis in axes] for lengths in (self.sizes, self.strides))
        return rows_meet(sizes, steps, (row_bytes, row_bytes), distance)

    def _axes_around_rows(self) -> list[str]:
        return [axis for axis in AXES if axis != "dim" and not self.is_list(axis)]

    def is_list(self, axis: str) -> bool:
        """Tell whether an axis is spread over tensors, so that its stride is meaningless."""
        return (axis == "kv" and len(self.tensors) > 1) or (
            axis == "layer" and len(self.tensors[0]) > 1
        )


def own_order(layout: Layout, names: Sequence[str]) -> tuple[str, ...]:
    """Return the order of a packed block's axes that leaves the longest runs of a view's.

    Lists first, then from the largest stride to the smallest. An axis that the view does not have
    stands before the next one of ``PACKED_AXES``.
    """
    lists = [axis for axis in PACKED_AXES if layout.is_list(axis)]
    inside = [axis for axis in names if axis in PACKED_AXES[:-1]]
    order = [*lists, *sorted(inside, key=lambda axis: -layout.strides[axis]), "dim"]
    for axis in PACKED_AXES:
        if axis not in order:
            later = PACKED_AXES[PACKED_AXES.index(axis) :]
            order.insert(next(i for i, other in enumerate(order) if other in later), axis)
    return tuple(order)


def parse_packed_axes(op: str, axes: str) -> tuple[str, ...]:
    """Split the axes of a packed block, such as ``"layer kv token head dim"``, and check them."""
    names = tuple(axes.split()) if isinstance(axes, str) else ()
    if sorted(names) != sorted(PACKED_AXES) or names[-1] != "dim":
        raise InvalidArgument(
            f"{op}: axes must be None or name {', '.join(PACKED_AXES)} once each, 'dim' last, "
            f"got {shown(axes, 80)}"
        )
    return names


def packed_layout(like: Layout, order: Sequence[str]) -> Layout:
    """Return the layout of packed blocks of a view, each of its axes in that order."""
    sizes, strides, step = dict(like.sizes), {}, like.itemsize
    for axis in (*reversed(order), "block"):
        strides[axis] = step
        step *= sizes[axis]
    return Layout(sizes, strides, like.itemsize, ((0,),))


@dataclass(frozen=True)
class Selection:
    """The part of each side that a plan copies, and the meaning of an id."""

    layers: Sequence[tuple[int, int]]  # (of src, of dst)
    num_kv: int
    src_head: int
    dst_head: int
    num_heads: int
    by_slot: bool = False  # an id is the place of one token, block * block_size + offset


def tokens_of_piece(src: Layout, dst: Layout, selection: Selection) -> int:
    """Return the most tokens of a piece, which lies in one block on each side: their gcd."""
    return 1 if selection.by_slot else gcd(src.sizes["token"], dst.sizes["token"])


def plan_values(
    src: Layout, dst: Layout, selection: Selection, *, by_row: bool = False
) -> list[int]:
    """Compute the operator's ``plan`` (its layout is described in csrc/ops/copy_plan.h).

    A run starts as one row of ``dim`` and absorbs every axis that continues it on both sides, so it
    becomes the longest range that is contiguous in both. What remains of layer and kv becomes
    planes; what remains of head and token becomes strided axes.

    By row nothing is absorbed: runs stay rows, every (layer, kv) is a plane, and the axes are head
    and token. The item sizes of the two sides may then differ; ``run_bytes`` is src's.
    """
    piece_tokens = tokens_of_piece(src, dst, selection)
    extents = {
        "layer": len(selection.layers),
        "kv": selection.num_kv,
        "head": selection.num_heads,
        "token": piece_tokens,
    }
    run_bytes = src.sizes["dim"] * src.itemsize
    if by_row:
        left, strided = list(extents), ["head", "token"]
    else:
        left = [axis for axis, extent in extents.items() if extent > 1]
        while absorbed := [a for a in left if _continues(src, dst, a, run_bytes, selection)]:
            run_bytes *= extents[absorbed[0]]
            left.remove(absorbed[0])
        strided = sorted(set(left) & {"head", "token"}, key=lambda axis: -src.strides[axis])
    values = [int(selection.by_slot)]
    for layout in (src, dst):
        values += _side_values(layout, piece_tokens, selection.by_slot)
    values.append(run_bytes)
    for axis in strided:
        values += [extents[axis], src.strides[axis], dst.strides[axis]]
    values += [1, 0, 0] * (MAX_AXES - len(strided))

    layers = selection.layers if "layer" in left else selection.layers[:1]
    for (src_layer, dst_layer), kv in product(layers, range(extents["kv"] if "kv" in left else 1)):
        src_tensor, src_offset = src.plane(kv, src_layer)
        dst_tensor, dst_offset = dst.plane(kv, dst_layer)
        src_offset += selection.src_head * src.strides["head"]
        dst_offset += selection.dst_head * dst.strides["head"]
        values += [src_tensor, src_offset, dst_tensor, dst_offset]
    return values


def _side_values(layout: Layout, piece_tokens: int, by_slot: bool) -> list[int]:
    num_blocks, num_tokens = layout.sizes["block"], layout.sizes["token"]
    block_stride, token_stride = layout.strides["block"], layout.strides["token"]
    if not by_slot:
        pieces, piece_stride = num_tokens // piece_tokens, piece_tokens * token_stride
        return [num_blocks, block_stride, pieces, piece_stride, 1, 0]
    num_slots = num_blocks * num_tokens
    if block_stride == num_tokens * token_stride:  # a slot then needs no division
        return [num_slots, token_stride, 1, 0, 1, 0]
    return [num_slots, block_stride, 1, 0, num_tokens, token_stride]


def _continues(src: Layout, dst: Layout, axis: str, run_bytes: int, selection: Selection) -> bool:
    """Tell whether a step along ``axis`` continues the run directly, on both sides."""
    if axis == "layer":
        first_src, first_dst = selection.layers[0]
        in_step = all(
            pair == (first_src + i, first_dst + i) for i, pair in enumerate(selection.layers)
        )
        if not in_step:
            return False
    return not (src.is_list(axis) or dst.is_list(axis)) and (
        src.strides[axis] == run_bytes == dst.strides[axis]
    )
