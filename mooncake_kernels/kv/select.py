"""Select the layers and heads of a copy."""

import numbers
import operator
from collections.abc import Sequence

from ..errors import InvalidArgument


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
