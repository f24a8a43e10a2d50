"""The parts of a ``Packer``: the layout of its records, and the plans into and out of them."""

from dataclasses import dataclass, replace

import torch

from ..bad_ids import BadIds
from ..errors import InvalidArgument
from ..transforms import Fp8, Rope
from .copying import Copying
from .pack_header import ALIGNMENT, PackedView, PackHeader, align
from .pack_overlap import Held, Overlap
from .select import choose_heads
from .staging import Staging

MAX_STAGINGS = 4  # the most that are cached


@dataclass(frozen=True)
class Side:
    """One side's cache and its transforms.

    Attributes:
        held: the part of the model that each view holds.
        dtypes: of each view's packed blocks.
        convert, rope, checksum: as for a ``Packer``.
    """

    held: list[Held]
    dtypes: list[torch.dtype]
    convert: Fp8 | None
    rope: Rope | None
    checksum: bool


class PackPlans:
    """The plans of one side for the staging buffers it is given, made once for each.

    Attributes:
        side: the cache.
        device: of the cache.
        bad: where the kernels of "pack" and of "unpack" report. Shared by all buffers, so that a
            report is not lost when a plan is dropped from the cache.
    """

    def __init__(self, side: Side):
        self.side = side
        self._views = [held.view for held in side.held]
        self.device = self._views[0].device
        num_blocks = self._views[0].num_blocks
        of_pack = ("Packer.pack: block_ids of a chunk", "Packer.pack: staging")
        of_unpack = ("Packer.unpack: staging", "Packer.unpack: block_ids")
        self.bad = {
            "pack": BadIds(self.device, of_pack, (num_blocks, 0)),
            "unpack": BadIds(self.device, of_unpack, (0, num_blocks)),
        }
        self._known: dict[tuple, tuple[Staging, list[Copying]]] = {}

    def __getstate__(self) -> dict[str, object]:  # a copy has copies of the buffers, not these
        return {**self.__dict__, "_known": {}}

    def header(self, num_blocks: int, chunk_bytes: int) -> PackHeader:
        """Lay out the records for ``num_blocks`` blocks."""
        side, packed, offset = self.side, [], 0
        for held, dtype in zip(side.held, side.dtypes, strict=True):
            view = held.view
            first, heads = choose_heads("heads", held.heads, view.num_heads)
            packed.append(
                PackedView(
                    dtype=str(dtype).removeprefix("torch."),
                    layers=tuple(held.layers),
                    kv=view.num_kv,
                    first_head=held.first_head + first if view.has_heads else 0,
                    heads=heads,
                    tokens=view.block_size,
                    dim=view.head_dim,
                    has_heads=view.has_heads,
                    has_tokens=view.has_tokens,
                    offset=offset,
                )
            )
            offset += align(packed[-1].num_bytes)
        record_bytes = offset + (ALIGNMENT if side.checksum else 0)
        chunk_blocks = max(1, chunk_bytes // record_bytes)
        return PackHeader(num_blocks, record_bytes, chunk_blocks, side.checksum, tuple(packed))

    def of(
        self, method: str, header: PackHeader, buffer: torch.Tensor
    ) -> tuple[Staging, list[Copying]]:
        """Return a staging buffer's records, and the plans for "pack" or "unpack"."""
        kind = replace(header, num_blocks=0, chunk_blocks=1)
        key = (method, buffer.data_ptr(), buffer.numel(), kind)
        known = self._known.get(key)
        if known is None:
            for oldest in list(self._known)[: 1 - MAX_STAGINGS]:
                self._known.pop(oldest, None)  # another thread may have removed it
            staging = Staging(f"Packer.{method}", header, buffer)
            plans = self._to(staging) if method == "pack" else self._out_of(header, staging)
            known = self._known[key] = (staging, plans)
        return known

    def overlaps(self, header: PackHeader) -> list[Overlap | None]:
        """Return the part of each packed view that this side holds."""
        pairs = zip(self.side.held, header.views, strict=True)
        return [held.overlap(packed) for held, packed in pairs]

    def check_kind(self, op: str, header: PackHeader) -> None:
        """Refuse records of another kind of cache."""
        held_views = self.side.held
        if len(header.views) != len(held_views):
            raise InvalidArgument(
                f"{op}: header must have {len(held_views)} views, got {len(header.views)}"
            )
        for held, packed in zip(held_views, header.views, strict=True):
            held.check(op, packed, converts=self.side.convert is not None)
        sizes = {view.block_size for view in self._views if view.has_tokens}
        sizes |= {packed.tokens for packed in header.views if packed.has_tokens}
        if len(sizes) > 1 and not all(view.has_tokens for view in self._views):
            raise InvalidArgument(
                f"{op}: header must have the cache's block_size for views without a 'token' axis, "
                f"got {sorted(sizes)}"
            )

    def _to(self, staging: Staging) -> list[Copying]:
        """Return one plan for all views, which share a checksum."""
        side, first = self.side, self.side.held[0]
        all_layers = all(
            list(held.layers.values()) == list(range(held.view.num_layers)) for held in side.held
        )
        pairs = [(layer, place) for place, layer in enumerate(first.layers.values())]
        convert = None
        for held, dtype in zip(side.held, side.dtypes, strict=True):
            if held.view.dtype != dtype and convert is None and side.convert is not None:
                convert = held.scales(side.convert, held.layers.values(), held.heads)
        return [
            Copying(
                *(self._views, staging.views),
                layers=None if all_layers else pairs,
                src_heads=first.heads,
                convert=convert,
                checksum=side.checksum,
                bad=self.bad["pack"],
            )
        ]

    def _out_of(self, header: PackHeader, staging: Staging) -> list[Copying]:
        """Return a plan for each view that has something to unpack."""
        plans = []
        for index, overlap in enumerate(self.overlaps(header)):
            if overlap is None:
                continue
            held, packed = self.side.held[index], staging.views[index]
            convert = self.side.convert if packed.dtype != held.view.dtype else None
            if convert is not None:
                layers = (layer for _, layer in overlap.layers)
                convert = held.scales(convert, layers, overlap.dst_heads)
            plans.append(
                Copying(
                    *(packed, held.view),
                    layers=overlap.layers,
                    src_heads=overlap.src_heads,
                    dst_heads=overlap.dst_heads,
                    convert=convert,
                    rope=self.side.rope if index == 0 else None,
                    # On a device the kernel compares the checksums.
                    checksum=header.has_checksums and self.device.type != "cpu",
                    bad=self.bad["unpack"],
                )
            )
        return plans
