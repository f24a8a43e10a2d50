"""What a packed record and a cache have in common: heads and layers of the model."""

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import InvalidArgument
from ..transforms import FLOATS, FP8, Fp8
from .layout import choose_heads
from .pack_header import DTYPES, PackedView
from .view import KVView


@dataclass(frozen=True)
class Overlap:
    """The part of one packed view to copy."""

    layers: tuple[tuple[int, int], ...]  # (place in the record, layer of the cache)
    src_heads: slice | None
    dst_heads: slice | None


@dataclass(frozen=True)
class Held:
    """The part of the model that one view of a cache holds."""

    view: KVView
    layers: dict[int, int]  # number in the model -> layer of the view
    first_head: int  # number in the model of the view's head 0
    heads: slice  # of the view

    def scales(self, convert: Fp8, layers: Iterable[int], heads: slice | None) -> Fp8:
        """Return the conversion for those layers and heads of the view, with its own scales."""
        if convert.of_copy or convert.scale.dim() == 0:
            return convert
        view = self.view
        table = convert.table((view.num_layers, view.num_kv, view.num_heads))
        return convert.for_copy(table[list(layers), :, heads or slice(None)])

    def overlap(self, packed: PackedView) -> Overlap | None:
        """Return what to copy; None if the two have nothing in common."""
        layers = tuple(
            (place, self.layers[number])
            for place, number in enumerate(packed.layers)
            if number in self.layers
        )
        if not layers:
            return None
        if not (self.view.has_heads and packed.has_heads):
            return Overlap(layers, None, None)
        first, count = choose_heads("heads", self.heads, self.view.num_heads)
        mine, other = self.first_head + first, packed.first_head
        start, stop = max(mine, other), min(mine + count, other + packed.heads)
        if start >= stop:
            return None
        own = self.first_head
        return Overlap(layers, slice(start - other, stop - other), slice(start - own, stop - own))

    def check(self, op: str, packed: PackedView, *, converts: bool) -> None:
        """Refuse a packed view of another kind."""
        view, dtype = self.view, DTYPES[packed.dtype]
        pairs: list[tuple[str, object, object]] = [
            ("kv", packed.kv, view.num_kv),
            ("dim", packed.dim, view.head_dim),
            ("a 'token' axis", packed.has_tokens, view.has_tokens),
        ]
        if not (packed.has_heads and view.has_heads):
            pairs.append(("heads", packed.heads, view.num_heads))
        can_convert = converts and (
            (dtype in FP8 and view.dtype in FLOATS) or (dtype in FLOATS and view.dtype in FP8)
        )
        if not can_convert:
            pairs.append(("dtype", dtype, view.dtype))
        for name, got, expected in pairs:
            if got != expected:
                raise InvalidArgument(
                    f"{op}: header must have the cache's {name} {expected}, got {got}"
                )
