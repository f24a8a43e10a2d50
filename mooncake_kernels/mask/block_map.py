"""Which tiles of a mask are full, partial or empty, so that a kernel can skip or not compare."""

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from .._arguments import as_bool, as_instance, as_integer, as_one_of
from .._engine import choose
from ..errors import InvalidArgument
from .batch import INT32_MAX
from .block_engine import BlockCall, Kind, TileList, run
from .request_rows import refuse_unfit
from .to_flash_attn4 import to_flash_attn4
from .to_flashinfer import to_flashinfer
from .to_flex import to_flex

if TYPE_CHECKING:
    from .mask_rows import MaskRows

AnyKind: TypeAlias = Kind | Literal["empty"]


@dataclass(frozen=True)
class BlockMap:
    """For each tile, whether its queries see all of its keys, some, or none.

    Tile (i, t) is the rows of q-block i against those of the keys ``[t * block_kv, (t + 1) *
    block_kv)`` of their request that exist. Request b has ``ceil(q_lens[b] / block_q)`` q-blocks,
    in row order, and ``ceil(kv_lens[b] / block_kv)`` tiles per q-block::

        full:    every row of the q-block sees every key of the tile
        empty:   none sees any
        partial: else

    Counts and ranges are computed at once; lists on first use, and cached.

    Attributes:
        rows: the mask.
        block_q, block_kv: rows and keys of a tile.
        whole: whether a tile that extends past its request's last query or key is never full.
        cu_q_blocks: int32 ``[num_requests + 1]``, where each request's q-blocks begin.
        ranges: int32 ``[num_q_blocks, 4]``: ``(kv_begin, full_begin, full_end, kv_end)``, counted
            in tiles. All tiles outside ``[kv_begin, kv_end)`` are empty, those in
            ``[full_begin, full_end)`` full: it is the first of the longest runs of full tiles.
            Tiles in between may be of any class. ``(0, 0, 0, 0)`` where all are empty, and
            ``full_begin == full_end == kv_begin`` where no tile is full.
        num_partial, num_full: int32 ``[num_q_blocks]``.
    """

    rows: "MaskRows"
    block_q: int
    block_kv: int
    whole: bool
    engine: str
    cu_q_blocks: torch.Tensor
    ranges: torch.Tensor
    num_partial: torch.Tensor
    num_full: torch.Tensor

    @property
    def num_q_blocks(self) -> int:
        """Return the number of q-blocks."""
        return len(self.ranges)

    @property
    def num_kv_blocks(self) -> torch.Tensor:
        """Return the tiles per q-block of each request, including empty ones: int32."""
        return -torch.div(-self.rows.batch.kv_lens, self.block_kv, rounding_mode="floor")

    @property
    def work(self) -> torch.Tensor:
        """Return the number of tiles each q-block has to compute, int32 ``[num_q_blocks]``."""
        return self.num_partial + self.num_full

    @property
    def total_tiles(self) -> int:
        """Return the total number of tiles to compute. It waits for the device."""
        return int(self.work.sum(dtype=torch.int64))

    @cached_property
    def partial_indices(self) -> torch.Tensor:
        """Return ``indices("partial")``."""
        return self.indices("partial")

    @cached_property
    def full_indices(self) -> torch.Tensor:
        """Return ``indices("full")``."""
        return self.indices("full")

    def request_of(self) -> torch.Tensor:
        """Return the request of each q-block, int64 ``[num_q_blocks]``.

        For q-blocks beyond the batch, it is the last request.
        """
        blocks = torch.arange(self.num_q_blocks, device=self.ranges.device, dtype=torch.int32)
        request = torch.bucketize(blocks, self.cu_q_blocks[1:], right=True)
        return request.clamp(max=max(self.rows.batch.num_requests - 1, 0))

    def count(self, kind: AnyKind) -> torch.Tensor:
        """Return how many tiles of a kind each q-block has, int32 ``[num_q_blocks]``.

        The kinds are "partial", "full", "any" for both, and "empty": the other tiles of its
        request.
        """
        as_one_of("block_map", "kind", kind, ("partial", "full", "any", "empty"))
        if kind == "empty":
            return self._num_tiles() - self.work
        return {"partial": self.num_partial, "full": self.num_full, "any": self.work}[kind]

    def indices(self, kind: AnyKind, width: int | None = None) -> torch.Tensor:
        """Return the tiles of a kind, ascending: int32 ``[num_q_blocks, width]``, zero-padded.

        The form of FlexAttention's ``kv_indices`` and of FlashAttention-4's fixed length.

        Args:
            kind: "partial", "full", "any" for both, or "empty".
            width: entries per row; None for as many as the fullest row has. In either case it waits
                for the device, to raise if there is too little room; ``block_map(width=)`` does
                not.

        Raises:
            InvalidArgument: a row has more tiles than ``width``.
        """
        longest = self.num_q_blocks and int(self.count(kind).max())
        width = longest if width is None else as_integer("block_map", "width", width, 0, INT32_MAX)
        if width < longest:
            raise InvalidArgument(f"block_map: width must be at least {longest}, got {width}")
        begins = torch.arange(self.num_q_blocks, device=self.ranges.device) * width
        flat = self._list(kind, begins, self.num_q_blocks * width)
        return flat.view(self.num_q_blocks, width)

    def varlen_indices(self, kind: AnyKind) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tiles of a kind in FlashAttention-4's form for batches of any lengths.

        Request b has its own matrix ``[q-blocks, tiles]``, zero-padded, in one flat int32 tensor
        from ``cu[b]`` on.

        Returns:
            The flat tensor, and ``cu``: int64 ``[num_requests + 1]``.
        """
        tiles = self.num_kv_blocks.to(torch.int64)
        blocks = self.cu_q_blocks.diff().to(torch.int64)
        cu = torch.nn.functional.pad(torch.cumsum(tiles * blocks, 0), (1, 0))
        request = self.request_of()
        local = torch.arange(self.num_q_blocks, device=cu.device) - self.cu_q_blocks[request]
        width = torch.nn.functional.pad(tiles, (0, 1))[request]  # 0 where there are no requests
        return self._list(kind, cu[request] + local * width, int(cu[-1])), cu

    def bsr(self, kind: AnyKind = "any") -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tiles of a kind as compressed rows, FlashInfer's block-sparse form.

        Tiles only: ``to_flashinfer`` also has the mask within partial ones.

        Returns:
            ``indptr`` int32 ``[num_q_blocks + 1]``, and ``indices`` int32 ``[indptr[-1]]``.

        Raises:
            InvalidArgument: 2**31 tiles of the kind or more.
        """
        indptr = torch.nn.functional.pad(torch.cumsum(self.count(kind), 0), (1, 0))
        num_listed = int(indptr[-1])
        if num_listed > INT32_MAX:
            raise InvalidArgument(
                f"block_map: rows must have less than 2**31 tiles of kind {kind!r} for indptr of "
                f"int32, got {num_listed}"
            )
        indices = self._list(kind, indptr[:-1], num_listed)
        return indptr.to(torch.int32), indices

    def physical_bsr(
        self, block_table: torch.Tensor, kind: AnyKind = "any", *, num_blocks: int | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``bsr(kind)`` with blocks of a paged cache instead of tiles.

        Args:
            block_table: integers ``[num_requests, max_blocks]``: the block that holds tile t of
                request b; a block of the cache holds ``block_kv`` keys. Entries of tiles that are
                not listed may have any value.
            kind: as in ``bsr``.
            num_blocks: size of the cache, an exclusive bound of the entries; None for 2**31.

        Raises:
            InvalidArgument: the table is too short for the keys of a request, or a listed entry is
                not a block: the first is named.

        On CUDA this waits for the lists.
        """
        self._check_table(block_table)
        if num_blocks is not None:
            num_blocks = as_integer("block_map", "num_blocks", num_blocks, 0, INT32_MAX)
        indptr, tiles = self.bsr(kind)
        request = torch.repeat_interleave(self.request_of(), self.count(kind), dim=0)
        blocks = block_table[request, tiles.to(torch.int64)].to(torch.int64)
        last = INT32_MAX if num_blocks is None else num_blocks - 1
        bad = ((blocks < 0) | (blocks > last)).nonzero()
        if bad.numel():
            first = int(bad[0])
            raise InvalidArgument(
                f"block_map: block_table[{int(request[first])}, {int(tiles[first])}] must be a "
                f"block, 0 to {last}, for its tile is listed, got {int(blocks[first])}"
            )
        return indptr, blocks.to(torch.int32)

    to_flash_attn4 = to_flash_attn4
    to_flashinfer = to_flashinfer
    to_flex = to_flex

    def _list(self, kind: AnyKind, begins: torch.Tensor, size: int) -> torch.Tensor:
        out = torch.zeros(size, dtype=torch.int32, device=self.ranges.device)
        if kind == "empty":
            block, tile = self._empty_tiles().nonzero().unbind(1)
            first = torch.cumsum(self.count(kind), 0) - self.count(kind)
            rank = torch.arange(len(block), device=out.device) - first[block]
            out[begins.to(torch.int64)[block] + rank] = tile.to(torch.int32)
            return out
        call = BlockCall(self.rows, self.block_q, self.block_kv, self.whole, self.num_q_blocks)
        run(call, self.engine, lists=(TileList(kind, out, begins),))
        return out

    def _num_tiles(self) -> torch.Tensor:
        """Return the number of tiles of each q-block, int32; 0 where there is no such block."""
        blocks = torch.arange(self.num_q_blocks, device=self.ranges.device)
        is_there = blocks < self.cu_q_blocks[-1]
        if self.rows.batch.num_requests == 0:
            return torch.zeros_like(self.work)
        return self.num_kv_blocks[self.request_of()] * is_there

    def _empty_tiles(self) -> torch.Tensor:
        """Return bool ``[num_q_blocks, tiles]``: tiles that exist but are in no list."""
        num_tiles = self._num_tiles()
        widest = int(num_tiles.max()) if self.num_q_blocks else 0
        empty = torch.arange(widest, device=num_tiles.device) < num_tiles[:, None]
        blocks = torch.arange(self.num_q_blocks, device=num_tiles.device)
        _, tiles = self.bsr("any")
        empty[torch.repeat_interleave(blocks, self.work), tiles.to(torch.int64)] = False
        return empty

    def _check_table(self, block_table: torch.Tensor) -> None:
        as_instance("block_map", "block_table", block_table, torch.Tensor, "a tensor")
        device, dtype = self.ranges.device, block_table.dtype
        is_integer = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
        if not is_integer or block_table.device != device:
            raise InvalidArgument(
                f"block_map: block_table must be of integers on {device}, got {dtype} on "
                f"{block_table.device}"
            )
        requests, tiles = self.rows.batch.num_requests, self.rows.batch.kv_lens_list
        needed = max((-(-kv_len // self.block_kv) for kv_len in tiles), default=0)
        if block_table.dim() != 2 or len(block_table) < requests or block_table.shape[1] < needed:
            raise InvalidArgument(
                f"block_map: block_table must be at least [{requests}, {needed}], got "
                f"{tuple(block_table.shape)}"
            )


def build(
    rows: "MaskRows",
    block_q: int,
    block_kv: int,
    whole: bool,
    width: int | None,
    num_q_blocks: int | None,
    engine: str,
) -> BlockMap:
    """Make the map of a mask; see ``MaskRows.block_map``."""
    block_q = as_integer("block_map", "block_q", block_q, 1, INT32_MAX)
    block_kv = as_integer("block_map", "block_kv", block_kv, 1, INT32_MAX)
    whole = as_bool("block_map", "whole", whole)
    batch = rows.batch
    refuse_unfit("block_map", rows.intervals[: batch.num_q])
    there_are = sum(-(-q_len // block_q) for q_len in batch.q_lens_list)
    if num_q_blocks is None:
        num_q_blocks = there_are
    num_q_blocks = as_integer("block_map", "num_q_blocks", num_q_blocks, there_are, INT32_MAX)
    engine = choose("block_map", engine, batch.device)
    cu_q_blocks = torch.zeros(batch.num_requests + 1, dtype=torch.int32, device=batch.device)
    ranges, counts = (
        torch.zeros(num_q_blocks, width, dtype=torch.int32, device=batch.device) for width in (4, 2)
    )
    call = BlockCall(rows, block_q, block_kv, whole, num_q_blocks)
    lists = () if width is None else _wide_lists(call, width)
    run(call, engine, cu_q_blocks=cu_q_blocks, ranges=ranges, counts=counts, lists=lists)
    result = BlockMap(
        rows, block_q, block_kv, whole, engine, cu_q_blocks, ranges, *counts.unbind(1)
    )
    for each in lists:  # fills the cached_property
        assert width is not None
        vars(result)[f"{each.kind}_indices"] = each.indices.view(num_q_blocks, width)
    return result


def _wide_lists(call: BlockCall, width: int) -> tuple[TileList, ...]:
    width = as_integer("block_map", "width", width, 1, INT32_MAX)
    device = call.rows.batch.device
    no_begins = torch.empty(0, dtype=torch.int64, device=device)
    size = call.num_q_blocks * width
    kinds: tuple[Kind, ...] = ("partial", "full")
    return tuple(
        TileList(kind, torch.zeros(size, dtype=torch.int32, device=device), no_begins)
        for kind in kinds
    )
