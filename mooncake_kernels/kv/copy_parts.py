"""The views of a cache that a ``CopyPlan`` copies, each with its destination."""

from collections.abc import Sequence
from typing import Any

import torch

from ..errors import InvalidArgument
from ..transforms import FP8, Fp8, Rope
from .devices import device_of_copy
from .layout import Selection, as_pairs, check_written_once, choose_heads, choose_layers
from .pack_overlap import Held
from .row_plan import RowPlan, check_dtypes
from .view import BlockPlan, KVView, gpu_index

Layers = slice | Sequence[int | tuple[int, int]] | None


class CopyPart:
    """One view of src and its destination.

    Attributes:
        src, dst: both sides.
        device: where it is copied.
        gpu: the index of that GPU; -1 for the CPU.
        converts: whether the dtypes differ.
        looks_at_elements: whether elements are processed rather than only bytes moved.
        meets_itself: whether it would read what it writes if both sides were one cache.
    """

    def __init__(
        self,
        src: KVView,
        dst: KVView,
        layers: Layers,
        src_heads: slice | None,
        dst_heads: slice | None,
        convert: Fp8 | None,
        rope: Rope | None,
        *,
        several: bool,
    ):
        self.device = device_of_copy(src, dst)
        self.gpu = gpu_index(self.device)
        for name in ("head_dim", "num_kv"):
            mine, other = getattr(src, name), getattr(dst, name)
            if mine != other:
                raise InvalidArgument(f"CopyPlan: dst must have src's {name} {mine}, got {other}")
        if src.has_tokens != dst.has_tokens:
            raise InvalidArgument(
                f"CopyPlan: dst must have a 'token' axis if src has one ({src.axes!r}), "
                f"got {dst.axes!r}"
            )
        dst.check_writable("CopyPlan: dst")
        check_dtypes(src, dst, convert, rope)
        self.src, self.dst = src, dst
        self.converts = src.dtype != dst.dtype
        self.looks_at_elements = self.converts or rope is not None
        self._convert, self._rope = convert if self.converts else None, rope
        self._layers = choose_layers("CopyPlan", layers, src.num_layers, dst.num_layers)
        if several and not (src.has_heads or dst.has_heads):
            src_heads = dst_heads = None
        src_head, num_heads = choose_heads("src_heads", src_heads, src.num_heads)
        dst_head, num_dst_heads = choose_heads("dst_heads", dst_heads, dst.num_heads)
        if num_heads != num_dst_heads:
            raise InvalidArgument(
                f"CopyPlan: dst_heads must be as many as src_heads ({num_heads}), "
                f"got {num_dst_heads}"
            )
        self._heads = (src_head, dst_head, num_heads)
        if self._convert is not None and not self._convert.of_copy:
            fp8 = dst if dst.dtype in FP8 else src
            self._convert.table((fp8.num_layers, fp8.num_kv, fp8.num_heads))  # raises if not
        layers_meet = {src for src, _ in self._layers} & {dst for _, dst in self._layers}
        self.meets_itself = abs(src_head - dst_head) < num_heads and bool(layers_meet)
        self._plans: dict[tuple, BlockPlan] = {}
        self._row_plans: dict[tuple, RowPlan] = {}

    def held(self, side: int) -> Held:
        """Return what side 0 (src) or 1 (dst) holds of the copied data, numbered from 0."""
        first, count = self._heads[side], self._heads[2]
        layers = {place: pair[side] for place, pair in enumerate(self._layers)}
        return Held((self.src, self.dst)[side], layers, -first, slice(first, first + count))

    def plan(self, op: str, layers: Layers, by_slot: bool) -> BlockPlan:
        """Return the plan for copying bytes."""
        chosen = None if layers is None else self._subset(op, layers)
        key = (by_slot, chosen)  # None for all layers: hashing 80 pairs takes 2 us
        if key not in self._plans:
            selection = self._selection(chosen, by_slot)
            self._plans[key] = BlockPlan(self.src.layout, self.dst.layout, selection)
        return self._plans[key]

    def row_plan(
        self, op: str, layers: Layers, by_slot: bool, first_words: tuple[int, int]
    ) -> RowPlan:
        """Return the plan for copying rows whose elements are processed."""
        chosen = None if layers is None else self._subset(op, layers)
        key = (by_slot, chosen, first_words)
        if key not in self._row_plans:
            selection = self._selection(chosen, by_slot)
            self._row_plans[key] = RowPlan(
                self.src, self.dst, selection, self._convert, self._rope, first_words
            )
        return self._row_plans[key]

    def check_memory(self, plan: BlockPlan | RowPlan) -> None:
        """Refuse caches whose memory was freed; for several, before the first one is written to."""
        can_tell = self.src.has_addresses and self.dst.has_addresses
        if can_tell and not torch.compiler.is_compiling():
            plan.resolved(self.src.registered, self.dst.registered, self.gpu)

    def _selection(self, layers: tuple[tuple[int, int], ...] | None, by_slot: bool) -> Selection:
        chosen = self._layers if layers is None else layers
        return Selection(chosen, self.src.num_kv, *self._heads, by_slot)

    def _subset(
        self, op: str, layers: slice | Sequence[int | tuple[int, int]]
    ) -> tuple[tuple[int, int], ...]:
        """Return the plan's layers that are named by their numbers in src."""
        if isinstance(layers, slice):
            num_layers = self.src.num_layers
            named = choose_layers(op, layers, num_layers, num_layers)
            return tuple(pair for pair in self._layers if (pair[0], pair[0]) in named)
        chosen: list[tuple[int, int]] = []
        for name in as_pairs(op, layers):
            of_plan = [pair for pair in self._layers if pair == name or (pair[0],) * 2 == name]
            if not of_plan:
                is_number = name[0] == name[1]
                among = [src for src, _ in self._layers] if is_number else [*self._layers]
                raise InvalidArgument(
                    f"{op}: layers must be among the plan's {among}, got "
                    f"{name[0] if is_number else name}"
                )
            chosen += of_plan
        check_written_once(op, chosen)
        return tuple(chosen)


Job = tuple[CopyPart, BlockPlan | RowPlan]


def are_one_cache(src: KVView, dst: KVView) -> bool:
    """Tell whether block i of src and block i of dst are the same memory."""
    if torch.compiler.is_compiling() or not (src.has_addresses and dst.has_addresses):
        return False  # addresses are not known yet
    places = [[tensor.data_ptr() for tensor in view.tensors] for view in (src, dst)]
    return src.num_blocks > 0 and places[0] == places[1] and src.layout == dst.layout


def as_views(name: str, views: KVView | Sequence[KVView], *, op: str = "CopyPlan") -> list[KVView]:
    listed: list[Any] = list(views) if isinstance(views, (list, tuple)) else [views]
    if not listed:
        raise InvalidArgument(f"{op}: {name} must be a KVView or a list of them, got []")
    for view in listed:
        if not isinstance(view, KVView):
            raise InvalidArgument(
                f"{op}: {name} must be a KVView or a list of them, got {type(view).__name__}"
            )
    for what in ("num_blocks", "device"):
        mine = getattr(listed[0], what)
        for other in (getattr(view, what) for view in listed):
            if other != mine:
                raise InvalidArgument(
                    f"{op}: views of {name} must have one {what}, got {mine} and {other}"
                )
    sizes = sorted({view.block_size for view in listed if view.has_tokens})
    if len(sizes) > 1:
        raise InvalidArgument(
            f"{op}: views of {name} must have one block_size, got {sizes[0]} and {sizes[1]}"
        )
    return listed


def as_layers(op: str, layers: Layers) -> Layers:
    """Return layers in a form that can be read more than once."""
    if layers is None or isinstance(layers, slice):
        return layers
    return as_pairs(op, layers)


def block_size_of(views: list[KVView]) -> int:
    return next((view.block_size for view in views if view.has_tokens), 1)


def check_layers_alike(op: str, views: list[KVView]) -> None:
    counts = sorted({view.num_layers for view in views})
    if len(counts) > 1:
        raise InvalidArgument(
            f"{op}: layers must be None for views of {counts[0]} and of {counts[1]} layers"
        )
