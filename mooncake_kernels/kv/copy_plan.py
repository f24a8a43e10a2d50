"""CopyPlan: copy blocks of one cache into another. Public as ``mk.CopyPlan``."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from .._tensors import have_addresses
from ..bad_ids import BadIds
from ..errors import InvalidArgument
from ..transforms import FP8, Fp8, Rope
from .copy_jobs import (
    CopyJobs,
    Job,
    add_up_jobs,
    check_checksum,
    check_jobs_engine,
    check_transforms,
    run_jobs,
)
from .copy_parts import (
    CopyPart,
    Layers,
    as_layers,
    as_views,
    block_size_of,
    check_layers_alike,
)
from .execute import BlockIds, Engine, as_ids, check_call
from .overlap import how_parts_meet, shared_ids, shared_runs, unless_shared
from .pack_overlap import Held
from .quick_run import QuickRun
from .row_plan import RowCall
from .view import KVView

if TYPE_CHECKING:
    from .pack_header import PackHeader
    from .packing import Packer


class CopyPlan:
    """Copy blocks of one cache into blocks of another, of any axis order and block size.

    Equivalent to::

        for src_block, dst_block in zip(src_blocks, dst_blocks):
            if src_block == -1 or dst_block == -1:
                continue
            for layer in layers:
                for kv in range(num_kv):
                    dst[layer, kv, dst_block, dst_heads] = src[layer, kv, src_block, src_heads]

    If the block sizes differ, the tokens of src's blocks go in order to those of dst's: with 16
    tokens in a block of src and 64 in one of dst, four blocks fill one.

    A cache may have several views that share its block ids: besides the keys and values,
    quantization scales, an indexer's keys or the state of an SSM. ``dst`` then has a view for each
    of src's, and they are copied in turn. A view without a ``token`` axis holds one entry per
    block, and can be copied only if both sides have the same block size.

    Args:
        src: what to read: a view, or a list of views with equally many blocks.
        dst: what to write: likewise. Each view has the same head dimension and number of kv as
            src's and, except with ``convert``, its dtype. Both sides are on one device; or one is
            on a GPU and the other in pinned host memory (``pin_memory()``, or registered with
            CUDA), which the GPU then reads or writes. It may share memory with ``src``; then no
            run may read what it writes. This is checked (for ids on a GPU, on the GPU) and refused
            like a bad id. Compiled code does not check it.
        layers: which layers to copy: a slice or a list of numbers, the same on both sides, or of
            pairs (layer of src, layer of dst), as between pipeline stages. None for all; both sides
            must then have equally many. With several views, those of one side must have equally
            many if ``layers`` is given.
        src_heads, dst_heads: a slice of the heads of each side, equally long, to copy a cache of
            one tensor-parallel size into one of another (see ``shard_heads``). None for all. With
            several views, it applies to those that have a ``head`` axis.
        convert: ``Fp8(scale)`` where one side is fp8 and the other is not.
        rope: ``Rope(...)`` to rotate keys by ``dst_positions - src_positions``, which each run is
            then given. With several views, it applies to the first one.
        checksum: whether a run returns the checksums of the blocks it has written, and accepts
            those of the blocks it reads (see ``checksum_blocks``).

    With any of the last three a copy goes row by row, which is slower than moving bytes.

    Raises:
        InvalidArgument: the two sides do not match; the message names the argument.
    """

    def __init__(
        self,
        src: KVView | Sequence[KVView],
        dst: KVView | Sequence[KVView],
        *,
        layers: Layers = None,
        src_heads: slice | None = None,
        dst_heads: slice | None = None,
        convert: Fp8 | None = None,
        rope: Rope | None = None,
        checksum: bool = False,
    ):
        check_transforms(convert, rope)
        check_checksum("CopyPlan", checksum)
        layers = as_layers("CopyPlan", layers)
        self.src, self.dst = src, dst
        src_views, dst_views = as_views("src", src), as_views("dst", dst)
        if len(src_views) != len(dst_views):
            raise InvalidArgument(
                f"CopyPlan: dst must have a view for each of src's {len(src_views)}, "
                f"got {len(dst_views)}"
            )
        several = len(src_views) > 1
        if several and layers is not None:
            check_layers_alike("CopyPlan", src_views)
            check_layers_alike("CopyPlan", dst_views)
        pairs = zip(src_views, dst_views, strict=True)
        self._parts = [
            CopyPart(
                *(*views, layers, src_heads, dst_heads, convert),
                rope if index == 0 else None,
                several=several,
            )
            for index, views in enumerate(pairs)
        ]
        if convert is not None and not any(part.converts for part in self._parts):
            raise InvalidArgument(
                "CopyPlan: convert must be None where dst has src's dtype, got Fp8 for "
                f"{src_views[0].dtype}"
            )
        self._jobs = CopyJobs(self._parts, rope is not None, checksum)
        self._transforms = (convert, rope, checksum)
        self._packers: tuple[Packer, Packer] | None = None
        first_src, first_dst = src_views[0], dst_views[0]
        self._device = self._parts[0].device
        self._block_sizes = block_size_of(src_views), block_size_of(dst_views)
        for view in src_views + dst_views:
            if not view.has_tokens and self._block_sizes[0] != self._block_sizes[1]:
                raise InvalidArgument(
                    f"CopyPlan: dst must have src's block_size {self._block_sizes[0]} to take "
                    f"views without a 'token' axis, got {self._block_sizes[1]}"
                )
        self._in_place, self._touch = how_parts_meet(self._parts)
        plain = not (several or self._jobs.by_row or self._in_place or self._touch)
        plain = plain and have_addresses([*first_src.tensors, *first_dst.tensors])
        num_blocks = self._num_blocks = (first_src.num_blocks, first_dst.num_blocks)
        names = ("CopyPlan.run: src_blocks", "CopyPlan.run: dst_blocks")
        self.bad_blocks = BadIds(self._device, names, num_blocks)
        src_size, dst_size = self._block_sizes
        num_slots = self._num_slots = (num_blocks[0] * src_size, num_blocks[1] * dst_size)
        names = ("CopyPlan.run_slots: src_slots", "CopyPlan.run_slots: dst_slots")
        self._bad_slots = BadIds(self._device, names, num_slots)
        part = self._parts[0]
        self._quick = QuickRun(part, self.bad_blocks, by_slot=False) if plain else None
        self._quick_slots = QuickRun(part, self._bad_slots, by_slot=True) if plain else None

    def run(
        self,
        src_blocks: BlockIds,
        dst_blocks: BlockIds,
        *,
        layers: Layers = None,
        src_positions: BlockIds | None = None,
        dst_positions: BlockIds | None = None,
        checksums: torch.Tensor | None = None,
        max_sms: int | None = None,
        engine: Engine = "auto",
    ) -> torch.Tensor | None:
        """Copy block ``src_blocks[i]`` of src into block ``dst_blocks[i]`` of dst.

        On CUDA the copy is queued on the current stream and may not have run yet. Ids on the CPU
        are checked and moved to the device first; pass them on the device to avoid that. Do not
        change ids in pinned memory until the stream has reached the copy. A CUDA graph that
        captured it must not outlive the plan, to which its kernels report.

        Args:
            src_blocks: ``[n]``, int32 or int64. Each in ``[0, src.num_blocks)``, or -1 to skip its
                tokens. Repeats are allowed.
            dst_blocks: ``[m]``, likewise for dst. The contents of a block that is named twice are
                undefined, possibly a mixture of its sources; this is not checked. With equal block
                sizes m = n. Otherwise the blocks of both sides hold the same number of tokens,
                except for a part of either side's last block, which is not read or is unchanged.
            layers: copy only these of the plan's layers, by their numbers in src (a slice selects
                those of the plan that are in it); None for all of them.
            src_positions: ``[n]``, int32 or int64: of the first token of each block of src.
                Required if the plan has a ``rope``, otherwise not allowed.
            dst_positions: ``[m]``, likewise: the positions that dst's blocks are to have.
            checksums: int64 ``[n]``: the expected checksums of src's blocks, over what the plan
                copies of them: as returned by the run that wrote them, or by ``checksum_blocks``.
                The blocks are read an extra time for it, before anything is written.
            max_sms: use at most this many multiprocessors; None for all. Ignored on the CPU, not
                supported by engine "triton".
            engine: "host" (CPU tensors); on CUDA, or between it and pinned host memory: "cuda", a
                kernel; "tma", a kernel of bulk copies for GPUs of compute capability 9.0 and runs
                at multiples of 16 bytes, which needs few multiprocessors for large runs;
                "copy_engine", the GPU's own, by ``cuMemcpyBatchAsync``, which takes 0.5 us of the
                caller's time for each run that could not be merged with the previous one, and
                cannot run on the default stream; "two_hop", between a GPU and the host: a kernel
                gathers into up to 64 MiB of the GPU's memory, and a few large copies move that to
                the host, or the reverse; it needs a contiguous host side and equal block sizes;
                "triton" (CUDA tensors; also on the CPU in its interpreter); "reference".
                "auto" is host on the CPU. On a GPU it is the fastest supported engine measured by
                `python -m mooncake_kernels calibrate`, or cuda if that was not run. A named engine
                never falls back. For copy_engine and two_hop the ids must be on the CPU, where they
                are read, and checked before anything is queued; these two do not work in compiled
                code and CUDA graphs.

        Returns:
            If the plan was made with ``checksum``, int64 ``[m]`` on the device of the caches: the
            checksum of what was written to each block of dst; 0 for a hole. Else None.

        Raises:
            ChecksumError: a block of src does not match ``checksums``. On the CPU nothing has been
                copied then; on CUDA this block is skipped, and the error is raised as for ids.
            InvalidArgument: an id is out of range, or an argument is not as above. Nothing has been
                copied then, unless the ids are on a GPU, or pinned ones that a graph captures:
                then, and in Triton's interpreter, the kernel checks them, pairs with a bad id are
                skipped, and the error is raised by the next ``run`` that finds it there, or by
                ``check``. Under torch.compile it is a plain ValueError.
            Unavailable: the named engine is not available.
            CudaError: CUDA refused the launch.
        """
        usual = _is_usual(layers, src_positions, dst_positions, checksums, max_sms)
        if usual and self._quick is not None and self._quick(src_blocks, dst_blocks, engine):
            return None
        check_call("CopyPlan.run", max_sms, engine)
        jobs = self._jobs.of("CopyPlan.run", layers, by_slot=False)
        check_jobs_engine("CopyPlan.run", engine, jobs)
        if self._device.type == "cuda":
            engine = self._jobs.choose(engine, jobs, (src_blocks, dst_blocks))
        names = ("CopyPlan.run: src_blocks", "CopyPlan.run: dst_blocks")
        src_ids, dst_ids = self._as_ids(names, (src_blocks, dst_blocks), self._num_blocks, engine)
        call, dst_ids = self.prepare(
            *("CopyPlan.run", jobs, src_ids, dst_ids, src_positions, dst_positions, checksums)
        )
        if call.actual is not None:
            add_up_jobs(jobs, src_ids, call.actual, self.bad_blocks, max_sms, engine)
        run_jobs(jobs, src_ids, dst_ids, call, self.bad_blocks, max_sms, engine)
        return call.sums

    def run_slots(
        self,
        src_slots: BlockIds,
        dst_slots: BlockIds,
        *,
        layers: Layers = None,
        src_positions: BlockIds | None = None,
        dst_positions: BlockIds | None = None,
        checksums: torch.Tensor | None = None,
        max_sms: int | None = None,
        engine: Engine = "auto",
    ) -> torch.Tensor | None:
        """Copy token by token: slot ``src_slots[i]`` of src into slot ``dst_slots[i]`` of dst.

        A slot is the place of one token, ``block * block_size + offset``, with its side's block
        size. Equivalent to::

            for src_slot, dst_slot in zip(src_slots, dst_slots):
                if src_slot == -1 or dst_slot == -1:
                    continue
                src_block, src_token = divmod(src_slot, src.block_size)
                dst_block, dst_token = divmod(dst_slot, dst.block_size)
                for layer in layers:
                    for kv in range(num_kv):
                        dst[layer, kv, dst_block, dst_heads, dst_token] = (
                            src[layer, kv, src_block, src_heads, src_token])

        For whole blocks ``run`` is faster: its contiguous runs are longer.

        Args:
            src_slots: ``[n]``, int32 or int64. Each in ``[0, src.num_blocks * src.block_size)``,
                or -1 to skip the pair. Repeats are allowed.
            dst_slots: ``[n]``, likewise for dst. The contents of a slot that is named twice are
                undefined; this is not checked.
            layers: as for ``run``.
            src_positions: as for ``run``, of each slot's token.
            dst_positions: likewise.
            checksums: as for ``run``, of each slot.
            max_sms: as for ``run``.
            engine: as for ``run``.

        Returns:
            As ``run``, the checksum of each slot.

        Raises:
            ChecksumError: as by ``run``.
            InvalidArgument: as by ``run``; also for views without a ``token`` axis.
            Unavailable: as by ``run``.
            CudaError: as by ``run``.
        """
        for part in self._parts:
            if not part.src.has_tokens:
                raise InvalidArgument(
                    f"CopyPlan.run_slots: views must have a 'token' axis, got {part.src.axes!r}"
                )
        usual = _is_usual(layers, src_positions, dst_positions, checksums, max_sms)
        quick = self._quick_slots
        if usual and quick is not None and quick(src_slots, dst_slots, engine):
            return None
        check_call("CopyPlan.run_slots", max_sms, engine)
        jobs = self._jobs.of("CopyPlan.run_slots", layers, by_slot=True)
        check_jobs_engine("CopyPlan.run_slots", engine, jobs)
        if self._device.type == "cuda":
            engine = self._jobs.choose(engine, jobs, (src_slots, dst_slots))
        names = ("CopyPlan.run_slots: src_slots", "CopyPlan.run_slots: dst_slots")
        src_ids, dst_ids = self._as_ids(names, (src_slots, dst_slots), self._num_slots, engine)
        if src_ids.numel() != dst_ids.numel():
            raise InvalidArgument(
                f"CopyPlan.run_slots: dst_slots must have as many ids as src_slots "
                f"({src_ids.numel()}), got {dst_ids.numel()}"
            )
        call = self._jobs.call(
            "CopyPlan.run_slots", src_ids, dst_ids, src_positions, dst_positions, checksums
        )
        dst_ids = self._apart(
            *("CopyPlan.run_slots: dst_slots", jobs, src_ids, dst_ids, self._num_slots[0])
        )
        if call.actual is not None:
            add_up_jobs(jobs, src_ids, call.actual, self._bad_slots, max_sms, engine)
        run_jobs(jobs, src_ids, dst_ids, call, self._bad_slots, max_sms, engine)
        return call.sums

    def pack(self, src_blocks: BlockIds, staging: torch.Tensor, **options: Any) -> "PackHeader":
        """Pack what the plan copies of src, for one write over the network: see ``Packer.pack``.

        Packed blocks are fp8 if either side of the plan is. ``options`` and errors are those of
        ``Packer.pack``. A process that has only one of the two caches uses a ``Packer`` instead of
        a plan.
        """
        return self._two_packers()[0].pack(src_blocks, staging, **options)

    def unpack(
        self,
        header: "PackHeader | bytes",
        staging: torch.Tensor,
        dst_blocks: BlockIds,
        **options: Any,
    ) -> bool:
        """Unpack the result of ``pack`` into dst: see ``Packer.unpack``."""
        return self._two_packers()[1].unpack(header, staging, dst_blocks, **options)

    def _two_packers(self) -> "tuple[Packer, Packer]":
        from .pack_plans import Side
        from .packing import Packer  # packing imports plans

        if self._packers is None:
            convert, rope, checksum = self._transforms
            dtypes = [
                part.dst.dtype if part.dst.dtype in FP8 else part.src.dtype for part in self._parts
            ]
            src, dst = ([part.held(side) for part in self._parts] for side in range(2))
            if convert is not None:  # scales belong to the fp8 side, whichever packs or unpacks
                pair = next(pair for pair in zip(src, dst, strict=True) if _converts(*pair))
                fp8 = pair[1 if pair[1].view.dtype in FP8 else 0]
                convert = fp8.scales(convert, fp8.layers.values(), fp8.heads)
            self._packers = (
                Packer.of_side(Side(src, dtypes, convert, None, checksum)),
                Packer.of_side(Side(dst, dtypes, convert, rope, checksum)),
            )
        return self._packers

    def check(self) -> None:
        """Wait for the current stream and raise if a run met a bad id. Does nothing on the CPU.

        Raises:
            ChecksumError: a block that an earlier run read did not match its checksum.
            InvalidArgument: an id of an earlier run was out of range; the message names it.
        """
        for packer in self._packers or ():
            packer.check()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self.bad_blocks.raise_if_any()
        self._bad_slots.raise_if_any()

    def jobs(self, op: str) -> list[Job]:
        """Return the jobs of a run of blocks of all layers; for this package's own use."""
        return self._jobs.of(op, None, by_slot=False)

    def prepare(
        self,
        op: str,
        jobs: list[Job],
        src_ids: torch.Tensor,
        dst_ids: torch.Tensor,
        src_positions: BlockIds | None = None,
        dst_positions: BlockIds | None = None,
        checksums: torch.Tensor | None = None,
        *,
        names: tuple[str, str] = ("src_blocks", "dst_blocks"),
    ) -> tuple[RowCall, torch.Tensor]:
        """Return what a run of blocks adds to its jobs, checked, and dst's ids for the kernels; for
        this package's own use.
        """
        _check_counts(op, names, src_ids.numel(), dst_ids.numel(), self._block_sizes)
        call = self._jobs.call(op, src_ids, dst_ids, src_positions, dst_positions, checksums)
        name = f"{op}: {names[1]}"
        return call, self._apart(name, jobs, src_ids, dst_ids, self._num_blocks[0])

    def _as_ids(
        self,
        names: tuple[str, str],
        ids: tuple[BlockIds, BlockIds],
        num_ids: tuple[int, int],
        engine: Engine,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        src, dst = (
            as_ids(name, given, self._device, engine, num_ids=limit)
            for name, given, limit in zip(names, ids, num_ids, strict=True)
        )
        return src, dst

    def _apart(
        self,
        name: str,
        jobs: list[Job],
        src_ids: torch.Tensor,
        dst_ids: torch.Tensor,
        num_ids: int,
    ) -> torch.Tensor:
        """Refuse to read and write the same place; return dst's ids.

        For ids on a device the host does not wait. If there is such a place, it returns bad ids:
        the kernel then copies nothing and reports it.
        """
        if torch.compiler.is_compiling():
            return dst_ids
        kernel_ids = dst_ids
        if self._in_place:  # one cache: block sizes are equal
            is_shared = shared_ids(src_ids, dst_ids, num_ids)
            if dst_ids.device.type != "cpu":
                kernel_ids = unless_shared(kernel_ids, is_shared)
            elif is_shared.any():
                raise InvalidArgument(
                    f"{name} must not be among src's, for src and dst are one cache, got "
                    f"{dst_ids[is_shared][0]}"
                )
        if self._touch:
            begins, is_shared = shared_runs(jobs, src_ids, dst_ids)
            if dst_ids.device.type != "cpu":
                kernel_ids = unless_shared(kernel_ids, is_shared)
            elif is_shared.any():
                raise InvalidArgument(
                    f"{name} must not share memory with the blocks that are read, got "
                    f"{int(begins[is_shared][0]):#x} in both"
                )
        return kernel_ids


def _is_usual(
    layers: Layers,
    src_positions: BlockIds | None,
    dst_positions: BlockIds | None,
    checksums: torch.Tensor | None,
    max_sms: int | None,
) -> bool:
    """Tell whether a run is given nothing but ids and an engine."""
    positions = src_positions is None and dst_positions is None
    return layers is None and positions and checksums is None and max_sms is None


def _check_counts(
    op: str, names: tuple[str, str], num_src: int, num_dst: int, block_sizes: tuple[int, int]
) -> None:
    src_size, dst_size = block_sizes
    src, dst = names
    if src_size == dst_size and num_src != num_dst:
        raise InvalidArgument(
            f"{op}: {dst} must have as many ids as {src} ({num_src}), got {num_dst}"
        )
    num_tokens = min(num_src * src_size, num_dst * dst_size)
    if -(-num_tokens // src_size) != num_src or -(-num_tokens // dst_size) != num_dst:
        raise InvalidArgument(
            f"{op}: {dst} must hold the {num_src * src_size} tokens of {src}, give or take a part "
            f"of one block, got {num_dst} blocks of {dst_size}"
        )


def _converts(src: Held, dst: Held) -> bool:
    return src.view.dtype != dst.view.dtype
