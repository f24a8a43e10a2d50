"""A copy by rows, which processes elements: the numbers and tables of its operator."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..bad_ids import BadIds
from ..errors import InvalidArgument
from ..transforms import BYTES, ELEMENT_TYPES, FLOATS, FP8, Fp8, Rope
from .devices import device_of
from .layout import Layout, Selection, plan_values, tokens_of_piece
from .view import KVView, PlanTensor, constants, gpu_index

WORD_BYTES = 8


@dataclass
class RowCall:
    """The inputs of one run: tensors on the caches' device, None for what is not used."""

    src_positions: torch.Tensor | None = None  # of the first token that each id names
    dst_positions: torch.Tensor | None = None
    expected: torch.Tensor | None = None  # checksums of src's blocks
    actual: torch.Tensor | None = None
    sums: torch.Tensor | None = None  # of dst's blocks; added to


class RowPlan:
    """What to copy of one view, and the transform of its rows.

    Attributes:
        selection: what to copy.
        device: where.
        gpu: the index of that GPU; -1 for the CPU.
        plan: of csrc/ops/copy_plan.h, by rows.
        transform: the numbers of csrc/ops/transform.cc.
        checksum_plan, checksum_transform: the same for summing src's blocks.
        scales: float32 ``[layers * kv, heads]`` or None.
        rope: or None.
        keys_alternate: whether every second plane is values.
        first_words, next_words: where this view's words begin and end among those of the sum of
            a block of src and of dst.
    """

    def __init__(
        self,
        src: KVView,
        dst: KVView,
        selection: Selection,
        convert: Fp8 | None,
        rope: Rope | None,
        first_words: tuple[int, int],
    ):
        self.selection, self.rope, self.first_words = selection, rope, first_words
        self.device = device_of(src.device, dst.device)
        self.gpu = gpu_index(self.device)
        self.keys_alternate = selection.num_kv == 2
        row_bytes = dst.head_dim * dst.layout.itemsize
        values = plan_values(src.layout, dst.layout, selection, by_row=True)
        self.plan = PlanTensor(values, row_bytes)
        of_src = replace(selection, layers=[(layer, layer) for layer, _ in selection.layers])
        self.checksum_plan = PlanTensor(plan_values(src.layout, src.layout, of_src, by_row=True))
        self.transform = constants(self._transform(src, dst, first_words[1]))
        row_bytes = src.head_dim * src.layout.itemsize
        self.checksum_transform = constants(
            [row_bytes, BYTES, BYTES, row_bytes, 0, 0, 0, 0, first_words[0]]
        )
        self.scales = None if convert is None else self._scales(convert, src, dst)
        self._inv_freq = None if rope is None else rope.frequencies(src.head_dim).to(self.device)
        self._piece_tokens = tokens_of_piece(src.layout, dst.layout, selection)
        self._pieces_per_id = tuple(
            self._tokens_per_id(layout) // self._piece_tokens for layout in (src.layout, dst.layout)
        )
        self.next_words = (first_words[0] + self._words(src), first_words[1] + self._words(dst))

    @property
    def values(self) -> torch.Tensor:
        """The plan without addresses, as for a ``BlockPlan``."""
        return self.plan.values

    def resolved(
        self, src: Sequence[torch.Tensor], dst: Sequence[torch.Tensor], gpu: int = -1
    ) -> torch.Tensor:
        """Return the plan with addresses, as for a ``BlockPlan``."""
        return self.plan.resolved(src, dst, gpu)

    def cos_sin(self, call: RowCall) -> torch.Tensor | None:
        """Return the cosines and sines of each piece's pairs, float32 ``[pieces, 2, pairs]``."""
        if self._inv_freq is None:
            return None
        assert call.src_positions is not None and call.dst_positions is not None
        num_pieces = min(
            positions.numel() * pieces
            for positions, pieces in zip(
                (call.src_positions, call.dst_positions), self._pieces_per_id, strict=True
            )
        )
        piece = torch.arange(num_pieces, device=self._inv_freq.device)
        src, dst = (
            positions[piece // pieces] + piece % pieces * self._piece_tokens
            for positions, pieces in zip(
                (call.src_positions, call.dst_positions), self._pieces_per_id, strict=True
            )
        )
        angle = (dst - src).double()[:, None] * self._inv_freq
        return torch.stack((angle.cos(), angle.sin()), dim=1).float()

    def _transform(self, src: KVView, dst: KVView, first_word: int) -> list[int]:
        if src.dtype == dst.dtype and self.rope is None:
            dim, types = src.head_dim * src.layout.itemsize, [BYTES, BYTES]
        else:  # check_dtypes() has ensured that both exist
            dim, types = src.head_dim, [ELEMENT_TYPES[view.dtype] for view in (src, dst)]
        first, num_pairs, interleaved = 0, 0, False
        if self.rope is not None:
            first, interleaved = self.rope.first, self.rope.interleaved
            num_pairs = self.rope.num_pairs(src.head_dim)
        row_bytes = dst.head_dim * dst.layout.itemsize
        return [dim, *types, row_bytes, self.keys_alternate, first, num_pairs, interleaved,
                first_word]  # fmt: skip

    def _scales(self, convert: Fp8, src: KVView, dst: KVView) -> torch.Tensor:
        """Return the scales for the copied planes, in their order."""
        selection = self.selection
        side = 1 if dst.dtype in FP8 else 0
        view, first = ((src, selection.src_head), (dst, selection.dst_head))[side]
        if convert.of_copy:
            chosen = convert.table((len(selection.layers), view.num_kv, selection.num_heads))
        else:
            table = convert.table((view.num_layers, view.num_kv, view.num_heads))
            layers = [pair[side] for pair in selection.layers]
            chosen = table[layers, :, first : first + selection.num_heads]
        return chosen.reshape(-1, selection.num_heads).to(self.device, copy=True)

    def _tokens_per_id(self, layout: Layout) -> int:
        return 1 if self.selection.by_slot else layout.sizes["token"]

    def _words(self, view: KVView) -> int:
        """Return the number of checksum words of a block in this view."""
        selection = self.selection
        rows = len(selection.layers) * selection.num_kv * selection.num_heads
        rows *= self._tokens_per_id(view.layout)
        return rows * -(-view.head_dim * view.layout.itemsize // WORD_BYTES)


def whole_view(view: KVView) -> tuple[RowPlan, BadIds]:
    """Return how to sum all of a view's blocks, and where bad ids go; made once per view."""
    if view.sums is None:
        name = "checksum_blocks: block_ids"
        bad = BadIds(view.device, (name, name), (view.num_blocks, view.num_blocks))
        view.sums = (RowPlan(view, view, view.everything, None, None, (0, 0)), bad)
    return view.sums


def check_dtypes(src: KVView, dst: KVView, convert: Fp8 | None, rope: Rope | None) -> None:
    """Refuse a pair of dtypes without a conversion."""
    if src.dtype != dst.dtype:
        is_pair = (src.dtype in FLOATS and dst.dtype in FP8) or (
            src.dtype in FP8 and dst.dtype in FLOATS
        )
        if convert is None:
            hint = " or convert=Fp8(...) given" if is_pair else ""
            raise InvalidArgument(
                f"CopyPlan: dst must have src's dtype {src.dtype}{hint}, got {dst.dtype}"
            )
        if not is_pair:
            raise InvalidArgument(
                "CopyPlan: convert must be between float32, float16 or bfloat16 and float8_e4m3fn "
                f"or float8_e5m2, got {src.dtype} and {dst.dtype}"
            )
    if rope is not None:
        check_rope("CopyPlan", src, rope)


def check_rope(op: str, view: KVView, rope: Rope) -> None:
    """Refuse a view whose keys a rope cannot turn."""
    if view.dtype not in ELEMENT_TYPES:
        raise InvalidArgument(f"{op}: rope must be given floats to turn, got {view.dtype}")
    if not view.has_tokens:
        raise InvalidArgument(
            f"{op}: rope must be given views with a 'token' axis, got {view.axes!r}"
        )
    rope.num_pairs(view.head_dim)  # raises if it does not fit
