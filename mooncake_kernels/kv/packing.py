"""Pack blocks for one write over the network, and unpack them elsewhere: ``mk.Packer``."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from .._arguments import as_integer
from .._tensors import not_traced
from ..bad_ids import BadIds, check_ids
from ..errors import ChecksumError, InvalidArgument, shown
from ..transforms import ELEMENT_TYPES, FLOATS, FP8, Fp8, Rope
from .copy_parts import as_views, block_size_of
from .copying import Copying, check_checksum, check_jobs_engine, check_transforms
from .execute import BlockIds, Engine, as_ids, check_call
from .layer_stream import LayerStream
from .layout import choose_heads
from .pack_header import ALIGNMENT, MAX_BLOCKS, PackedView, PackHeader, align
from .pack_overlap import Held, Overlap
from .row_plan import check_rope
from .staging import Staging, check_buffer
from .token_shard import slots_of
from .view import KVView

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
        bad: where the kernels of "pack", of "unpack" and of one by "tokens" report. Shared by all
            buffers, so that a report is not lost when a plan is dropped from the cache.
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
            "tokens": BadIds(self.device, of_unpack, (0, num_blocks * block_size_of(self._views))),
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
                    axes=_axes_of_record(view),
                    layers=tuple(held.layers),
                    kv=view.num_kv,
                    first_head=held.first_head + first if view.has_heads else 0,
                    heads=heads,
                    tokens=view.block_size,
                    dim=view.head_dim,
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
                    slots_bad=self.bad["tokens"],
                )
            )
        return plans


DEFAULT_CHUNK_BYTES = 32 << 20
MAX_FIRST = (1 << 31) - 1  # head or layer
MAX_CHUNK_BYTES = (1 << 62) - 1
HOLE = -1


class Packer:
    """Pack blocks of a cache into one buffer that a peer unpacks into a cache of any layout.

    Sender and receiver each have a packer for their own cache; what the receiver needs to know
    travels in a ``PackHeader``. Equivalent to::

        staging[i] = src[layers, :, src_blocks[i], heads], packed in src's order     # pack
        dst[layers, :, dst_blocks[i], heads] = staging[i]             # unpack, what both sides have

    Axis orders and block sizes may differ, as may the heads and layers of the model that each side
    holds (tensor and pipeline parallelism): from a record, a receiver takes those it holds.

    Args:
        views: the cache: a view, or several that share block ids (see ``CopyPlan``).
        first_head: number in the model of the views' head 0: ``rank * num_heads // ranks``.
        first_layer: likewise, of their layer 0.
        layers: of each view, that are packed, or written by ``unpack``; None: all.
        convert: ``Fp8(scale)``: to pack floats as fp8, with ``dtype``; to unpack fp8 into floats,
            or floats into fp8. With several views, it applies where the dtypes differ. Scales are
            per layer and head of this packer's cache, whichever side is fp8; a tensor applies to
            the first view only.
        dtype: fp8 dtype of the first view's packed blocks; None for that of the cache.
        rope: ``Rope(...)`` to rotate the first view's keys when they are unpacked.
        checksum: whether packed records have checksums. ``unpack`` verifies them if they are there.

    Attributes:
        views, device: of the cache.

    Raises:
        InvalidArgument: an argument is not as above.
    """

    def __init__(
        self,
        views: KVView | Sequence[KVView],
        *,
        first_head: int = 0,
        first_layer: int = 0,
        layers: range | None = None,
        convert: Fp8 | None = None,
        dtype: torch.dtype | None = None,
        rope: Rope | None = None,
        checksum: bool = True,
    ):
        first_head = as_integer("Packer", "first_head", first_head, 0, MAX_FIRST)
        first_layer = as_integer("Packer", "first_layer", first_layer, 0, MAX_FIRST)
        held_views = as_views("views", views, op="Packer")
        if dtype is not None and (dtype not in FP8 or convert is None):
            raise InvalidArgument(f"Packer: dtype must be fp8, and convert be given, got {dtype}")
        check_transforms(convert, rope, op="Packer")
        if convert is not None:
            _check_convert(held_views, convert, dtype)
        if rope is not None:
            check_rope("Packer", held_views[0], rope)
        held = [
            Held(view, {first_layer + i: i for i in chosen}, first_head, slice(None))
            for view, chosen in ((view, _chosen_layers(view, layers)) for view in held_views)
        ]
        dtypes = [dtype or held_views[0].dtype, *(view.dtype for view in held_views[1:])]
        check_checksum("Packer", checksum)
        self._set(Side(held, dtypes, convert, rope, checksum))

    def _set(self, side: Side) -> None:
        self._plans = PackPlans(side)
        self.views, self.device = [held.view for held in side.held], self._plans.device

    @classmethod
    def of_side(cls, side: Side) -> "Packer":
        """Return the packer of one side of a plan; for this package's own use."""
        packer = cls.__new__(cls)
        packer._set(side)
        return packer

    def header(self, num_blocks: int, *, chunk_bytes: int = DEFAULT_CHUNK_BYTES) -> PackHeader:
        """Return the header that ``pack`` returns for this many blocks.

        It gives the required size of the staging buffer (``num_bytes``) and the ranges to send, in
        order (``chunks``).
        """
        num_blocks = as_integer("Packer.header", "num_blocks", num_blocks, 0, MAX_BLOCKS)
        chunk_bytes = as_integer("Packer.header", "chunk_bytes", chunk_bytes, 1, MAX_CHUNK_BYTES)
        return self._plans.header(num_blocks, chunk_bytes)

    @not_traced  # a staging buffer is written through views of several dtypes
    def pack(
        self,
        block_ids: BlockIds,
        staging: torch.Tensor,
        *,
        chunk_bytes: int = DEFAULT_CHUNK_BYTES,
        ready: LayerStream | None = None,
        max_sms: int | None = None,
        engine: Engine = "auto",
    ) -> PackHeader:
        """Pack blocks into a staging buffer, record by record.

        On CUDA it is queued on the current stream; the header is returned at once.

        Args:
            block_ids: ``[n]``, int32 or int64. Each in the cache, or -1 to leave its record
                unchanged; the receiver must then pass -1 as well.
            staging: 1-d uint8 on the cache's device, of ``header(n).num_bytes`` or more, starting
                at a multiple of 16 bytes. A packer caches its plans for the last few buffers.
            chunk_bytes: approximate size of a chunk: whole records, and at least one.
            ready: a LayerStream with a layer for each of the header's chunks. ``pack`` begins a
                step, and signals chunk i when it is packed and can be sent.
            max_sms: as for ``CopyPlan.run``.
            engine: as for ``CopyPlan.run``.

        Returns:
            The header, for the receiver.

        Raises:
            InvalidArgument: an argument is not as above; nothing has been packed then, unless ids
                are on the device: for these see ``CopyPlan.run``.
            Unavailable: the named engine is not available.
        """
        op = "Packer.pack"
        check_call(op, max_sms, engine)
        ids = self.as_ids(op, block_ids)
        header = self.header(ids.numel(), chunk_bytes=chunk_bytes)
        check_buffer(op, staging, header, self.device)
        chunks = header.chunks
        if ready is not None and (
            not isinstance(ready, LayerStream) or ready.num_layers < len(chunks)
        ):
            got = getattr(ready, "num_layers", type(ready).__name__)
            raise InvalidArgument(
                f"{op}: ready must be a LayerStream of {len(chunks)} layers, one a chunk, got {got}"
            )
        if ready is not None and ready.device != self.device:
            raise InvalidArgument(f"{op}: ready must be on {self.device}, got {ready.device}")
        packed, [plan] = self._plans.of("pack", header, staging)
        check_jobs_engine(op, engine, plan.blocks.jobs(op))
        if ready is not None:
            ready.begin_signals()
        for index, chunk in enumerate(chunks):
            end = chunk.first_block + chunk.num_blocks
            records = torch.arange(chunk.first_block, end, device=self.device)
            part = ids[chunk.first_block : end]
            sums = plan.blocks.run(part, records, max_sms=max_sms, engine=engine)
            if sums is not None:  # a hole's record keeps its checksum
                before = packed.checksums(end)[chunk.first_block :]
                before.copy_(torch.where(part == HOLE, before, sums))
            if ready is not None:
                ready.signal_layer(index, staging)
        return header

    @not_traced
    def unpack(
        self,
        header: PackHeader | bytes,
        staging: torch.Tensor,
        block_ids: BlockIds,
        *,
        src_positions: BlockIds | None = None,
        dst_positions: BlockIds | None = None,
        max_sms: int | None = None,
        engine: Engine = "auto",
    ) -> bool:
        """Unpack a staging buffer that a peer has packed into blocks of this cache.

        On CUDA it is queued on the current stream.

        Args:
            header: what ``pack`` returned, or its ``to_bytes()``.
            staging: as for ``pack``: the peer's, or a buffer that received its bytes.
            block_ids: the destination of record i; -1 for none. As many as there are records; if
                the peer's block size differs, as many as hold their tokens.
            src_positions: position of the first token of each record, for a packer with ``rope``.
            dst_positions: the positions that the blocks of ``block_ids`` are to have.
            max_sms: as for ``CopyPlan.run``.
            engine: as for ``CopyPlan.run``.

        Returns:
            Whether the records contain any of this cache's heads and layers.

        Raises:
            ChecksumError: a record that is needed does not match its checksum; nothing has been
                written then. On CUDA the error is raised as for ids.
            InvalidArgument: the header is invalid, or of another kind of cache, or an argument is
                not as above; nothing has been written then.
            Unavailable: the named engine is not available.
        """
        positions = (src_positions, dst_positions)
        op = "Packer.unpack"
        make = self.checked_unpack(op, header, staging, block_ids, positions, max_sms, engine)
        if make is not None:
            make()
        return make is not None

    def checked_unpack(
        self,
        op: str,
        header: PackHeader | bytes,
        staging: torch.Tensor,
        block_ids: BlockIds,
        positions: tuple[BlockIds | None, BlockIds | None],
        max_sms: int | None,
        engine: Engine,
        tokens: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> Callable[[], None] | None:
        """Check an ``unpack``, checksums on the CPU included, and return what makes it; None if
        there is nothing to unpack. For this package's own use.

        ``tokens``: which tokens of the records go to which of the blocks, as ``common_tokens``
        returns them; None for all, in order.
        """
        check_call(op, max_sms, engine)
        header = _as_header(op, header)
        ids = self.as_ids(op, block_ids)
        check_buffer(op, staging, header, self.device)
        self._plans.check_kind(op, header)
        overlaps = self._plans.overlaps(header)
        if not any(overlaps) or (tokens is not None and tokens[0].numel() == 0):
            return None
        packed, plans = self._plans.of("unpack", header, staging)
        if tokens is None:
            src_ids = torch.arange(header.num_blocks, device=self.device)
        else:
            ids = slots_of(ids, tokens[1], block_size_of(self.views))
            src_ids = tokens[0].to(self.device)
        # Positions for keys that are not here are ignored.
        takes = None if self._plans.side.rope is not None and overlaps[0] is None else plans[0]
        prepared = []
        for plan in plans:
            runs = plan.blocks if tokens is None else plan.slots
            jobs = runs.jobs(op)
            check_jobs_engine(op, engine, jobs)
            given = positions if plan is takes else ()
            names = ("staging's records", "block_ids")
            call, dst_ids = runs.prepare(op, names, jobs, src_ids, ids, *given)
            prepared.append((runs, jobs, dst_ids, call))
            for part, rows_or_bytes in jobs:  # all are checked before the first write
                part.check_memory(rows_or_bytes)
        expected, actual = self._checksums(header, packed, max_sms, engine)
        if expected is not None and actual is not None:
            if tokens is None:
                wrong = (expected != actual) & self._wanted(header, ids)
            else:
                record_of = src_ids // _record_tokens(header)
                taken = torch.zeros_like(expected).index_add_(0, record_of, (ids != HOLE).long())
                wrong = (expected != actual) & (taken > 0)
            if self.device.type == "cpu":
                _raise_for_first(op, wrong, expected, actual)
                expected = actual = None  # no need to compare them again
            else:
                if tokens is not None:  # the kernel compares a checksum for each id
                    wrong, expected, actual = (
                        of_records[record_of] for of_records in (wrong, expected, actual)
                    )
                src_ids = without_right_ones(src_ids, wrong)

        def make() -> None:
            for runs, jobs, dst_ids, call in prepared:
                call.expected, call.actual = expected, actual
                runs.launch(jobs, src_ids, dst_ids, call, max_sms, engine)

        return make

    def check(self) -> None:
        """Wait for the current stream and raise if a call met a bad id or checksum; not on the CPU.

        Raises:
            ChecksumError: a record did not match its checksum; the message names it.
            InvalidArgument: an id was out of range.
        """
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        for bad in self._plans.bad.values():
            bad.raise_if_any()

    def as_ids(self, op: str, block_ids: BlockIds) -> torch.Tensor:
        """Return ids on the device, checked unless they were there; for this package's own use."""
        name, num_blocks = f"{op}: block_ids", self.views[0].num_blocks
        on_device = isinstance(block_ids, torch.Tensor) and block_ids.device.type != "cpu"
        ids = as_ids(name, block_ids, self.device if on_device else torch.device("cpu"))
        if not on_device:
            check_ids(name, ids, num_blocks)
        return as_ids(name, ids, self.device)

    def _checksums(
        self,
        header: PackHeader,
        staging: Staging,
        max_sms: int | None,
        engine: Engine,
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return the expected and the actual checksums of the records."""
        if not header.has_checksums:
            return None, None
        expected = staging.checksums(header.num_blocks).contiguous()
        actual = staging.add_up(header.num_blocks, max_sms, engine)
        return expected, actual

    def _wanted(self, header: PackHeader, ids: torch.Tensor) -> torch.Tensor:
        """Tell for each record whether one of its tokens goes to a block that is not a hole."""
        src_size = _record_tokens(header)
        dst_size = block_size_of(self.views)
        first = torch.arange(header.num_blocks, device=ids.device) * src_size
        last = (first + src_size - 1).clamp(max=ids.numel() * dst_size - 1)
        # The number of ids before each that are not holes.
        before = torch.cat((ids.new_zeros(1), (ids != HOLE).cumsum(0)))
        return before[last // dst_size + 1] > before[first // dst_size]


def _record_tokens(header: PackHeader) -> int:
    return next((view.tokens for view in header.views if view.has_tokens), 1)


def _axes_of_record(view: KVView) -> str:
    """Return the axes of its packed blocks without those that it does not have."""
    absent = {"head"} if not view.has_heads else set()
    absent |= {"token"} if not view.has_tokens else set()
    return " ".join(axis for axis in view.packed.axes if axis not in absent)


def _chosen_layers(view: KVView, layers: range | None) -> range:
    every = range(view.num_layers)
    if layers is None:
        return every
    if not isinstance(layers, range) or not layers or not set(layers) <= set(every):
        raise InvalidArgument(
            f"Packer: layers must be a range of {every}, and not empty, got {shown(layers)}"
        )
    return layers


def _check_convert(views: Sequence[KVView], convert: Fp8, dtype: torch.dtype | None) -> None:
    """Refuse a conversion that none of the views, or not the first one, can have."""
    first = views[0]
    if not any(view.dtype in ELEMENT_TYPES for view in views):
        raise InvalidArgument(
            f"Packer: convert must be None for views of other dtypes than floats, got {first.dtype}"
        )
    if dtype is not None and first.dtype not in (*FLOATS, dtype):
        raise InvalidArgument(
            "Packer: dtype must be None where the first view is not float32, float16 or bfloat16, "
            f"got {dtype} for {first.dtype}"
        )
    convert.table((first.num_layers, first.num_kv, first.num_heads))  # raises if it does not fit


def without_right_ones(records: torch.Tensor, wrong: torch.Tensor) -> torch.Tensor:
    """Return the records for a kernel: if any is wrong, only wrong ones, so that it writes nothing.

    The kernel skips and reports these. The host does not wait to learn whether there are any.
    """
    return torch.where(wrong | ~wrong.any(), records, HOLE)


def _raise_for_first(
    op: str, wrong: torch.Tensor, expected: torch.Tensor, actual: torch.Tensor
) -> None:
    for index in wrong.nonzero().flatten().tolist():
        raise ChecksumError(
            f"{op}: staging: record {index} must have checksum {expected[index]}, got "
            f"{actual[index]}"
        )


def _as_header(op: str, header: PackHeader | bytes) -> PackHeader:
    if isinstance(header, (bytes, bytearray, memoryview)):
        return PackHeader.from_bytes(header)
    if not isinstance(header, PackHeader) or not header.check():
        raise InvalidArgument(
            f"{op}: header must be a PackHeader or its bytes, got {shown(header)}"
        )
    return header
