"""What a ``CopyPlan`` and a ``Packer`` copy, checked once, and the runs that do it."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.compiler import is_compiling

from .. import _library
from .._tensors import PLAIN
from ..bad_ids import BadIds, check_ids
from ..errors import CudaError, InvalidArgument, Unavailable
from ..transforms import Fp8, Rope
from .calibration import default_engine, defaults
from .choose import choose
from .copy_parts import (
    CopyPart,
    Job,
    Layers,
    as_layers,
    as_views,
    block_size_of,
    check_layers_alike,
)
from .execute import (
    MOVES_BYTES,
    BlockIds,
    Engine,
    add_checksums,
    as_ids,
    check_call,
    check_engine,
    execute,
    to_device,
    transform,
)
from .execute_listed import copy_by_kernel
from .overlap import OverlapCheck
from .row_plan import RowCall, RowPlan
from .view import KVView

BY_OPERATOR = "copy_blocks: "  # how its errors begin that do not name an id


class CopyRuns:
    """Runs over ids of one kind: of blocks, or of slots.

    Args:
        op: the call that is made, for errors.
        names: of its ids, (src, dst).
        parts: the views that are copied.
        overlap: refuses to read and write the same place.
        num_ids: exclusive upper bounds of the ids, (src, dst).
        num_tokens: of one id, (src, dst).
        turns: whether keys are rotated.
        checksum: whether blocks are summed.
        by_slot: whether ids name slots.
        bad: where kernels report bad ids; None for an object of its own.

    Attributes:
        bad: the same.
    """

    def __init__(
        self,
        op: str,
        names: tuple[str, str],
        parts: list[CopyPart],
        overlap: OverlapCheck,
        num_ids: tuple[int, int],
        num_tokens: tuple[int, int],
        *,
        turns: bool,
        checksum: bool,
        by_slot: bool,
        bad: BadIds | None = None,
    ):
        self._op, self._names, self._parts, self._overlap = op, names, parts, overlap
        self._num_ids, self._num_tokens = num_ids, num_tokens
        self._turns, self._checksum, self._by_slot = turns, checksum, by_slot
        self._device, self._gpu = parts[0].device, parts[0].gpu
        self._by_row = turns or checksum or any(part.looks_at_elements for part in parts)
        self._device_type = "cpu" if self._gpu < 0 else "cuda"
        kernel = "host" if self._gpu < 0 else "cuda" if _library.has_cuda else ""
        self._usual_engines = ("auto", kernel) if kernel else ("auto",)
        # Whether this kernel moves the bytes of one view, and nothing but ids has to be checked.
        has_addresses = parts[0].src.has_addresses and parts[0].dst.has_addresses
        is_one_move = len(parts) == 1 and not self._by_row and not overlap.is_needed
        self._is_plain = is_one_move and has_addresses and kernel != ""
        self._all_layers: list[Job] = []  # the jobs of a plan of one view: from the first run on
        self._in_errors = (f"{op}: {names[0]}", f"{op}: {names[1]}")
        self.bad = BadIds(self._device, self._in_errors, num_ids) if bad is None else bad

    def run(
        self,
        src: BlockIds,
        dst: BlockIds,
        layers: Layers = None,
        src_positions: BlockIds | None = None,
        dst_positions: BlockIds | None = None,
        checksums: torch.Tensor | None = None,
        max_sms: int | None = None,
        engine: Engine = "auto",
    ) -> torch.Tensor | None:
        """Check and launch one run; return the checksums of what it has written, if any."""
        op, device, gpu = self._op, self._device, self._gpu
        is_usual = type(engine) is str and engine in self._usual_engines
        if not is_usual or max_sms is not None:
            check_call(op, max_sms, engine)
        jobs = self._all_layers
        if layers is not None or not jobs:
            jobs = self.jobs(op, layers)
        if not is_usual:
            check_jobs_engine(op, engine, jobs)
        if gpu >= 0:
            first = jobs[0][0]
            engine = choose(engine, first.src, first.dst, [plan for _, plan in jobs], (src, dst))
            is_usual = engine in self._usual_engines
        adds = src_positions is not None or dst_positions is not None or checksums is not None
        if is_usual and self._is_plain and not adds and not is_compiling():
            # The operator checks ids before a byte moves; here it would take 0.5 of 3.3 us.
            bad, (part, plan) = self.bad, jobs[0]
            try:
                if type(src) is not Tensor or src.device != device or not src.is_contiguous():
                    src = as_ids(self._in_errors[0], src, device, engine, num_ids=self._num_ids[0])
                if type(dst) is not Tensor or dst.device != device or not dst.is_contiguous():
                    dst = as_ids(self._in_errors[1], dst, device, engine, num_ids=self._num_ids[1])
                if engine == "auto" and self._device_type not in defaults:
                    default_engine(self._device_type)  # which reads the calibration
                if bad.seen is not None:
                    bad.raise_if_any()
                if type(src) in PLAIN and type(dst) in PLAIN:  # others may be traced
                    limit = 0 if max_sms is None else int(max_sms)
                    copy_by_kernel(plan, part.src, part.dst, src, dst, bad.address, limit, gpu)
                    increment_version(part.dst.versioned)
                    return None
            except (InvalidArgument, RuntimeError) as error:
                if isinstance(error, CudaError | Unavailable):
                    raise
                if isinstance(error, InvalidArgument) and not str(error).startswith(BY_OPERATOR):
                    raise
            # Of another shape or dtype, or too few: the checks below say which.
        src_ids = as_ids(self._in_errors[0], src, device, engine, num_ids=self._num_ids[0])
        dst_ids = as_ids(self._in_errors[1], dst, device, engine, num_ids=self._num_ids[1])
        added = (src_positions, dst_positions, checksums)
        call, dst_ids = self.prepare(op, self._names, jobs, src_ids, dst_ids, *added)
        if call.actual is not None:
            self._add_up(jobs, src_ids, call.actual, max_sms, engine)
        self.launch(jobs, src_ids, dst_ids, call, max_sms, engine)
        return call.sums

    def checked(
        self, src: BlockIds, dst: BlockIds, max_sms: int | None, engine: Engine
    ) -> Callable[[], torch.Tensor | None]:
        """Check a run of all layers, and return what makes it; only ids on a GPU may still be bad.

        For several runs that must all be right before the first byte moves.
        """
        check_call(self._op, max_sms, engine)
        jobs = self.jobs(self._op)
        check_jobs_engine(self._op, engine, jobs)
        if self._gpu >= 0:
            first = jobs[0][0]
            engine = choose(engine, first.src, first.dst, [plan for _, plan in jobs], (src, dst))
        ids = []
        for side, given in enumerate((src, dst)):
            name, num_ids = self._in_errors[side], self._num_ids[side]
            ids.append(as_ids(name, given, self._device, engine, num_ids=num_ids))
            if ids[side].device.type == "cpu":
                check_ids(name, ids[side], num_ids)
        call, dst_ids = self.prepare(self._op, self._names, jobs, *ids)
        for part, plan in jobs:
            part.check_memory(plan)

        def make() -> torch.Tensor | None:
            self.launch(jobs, ids[0], dst_ids, call, max_sms, engine)
            return call.sums

        return make

    def jobs(self, op: str, layers: Layers = None) -> list[Job]:
        """Return the jobs of a run, all of them checked before the first byte moves.

        ``op`` is the call for errors.
        """
        several = len(self._parts) > 1
        chosen = as_layers(op, layers) if several else layers
        if several and chosen is not None:
            check_layers_alike(op, [part.src for part in self._parts])
        jobs: list[Job] = []
        first_words = (0, 0)
        for part in self._parts:
            if part.looks_at_elements or self._checksum:
                rows = part.row_plan(op, chosen, self._by_slot, first_words)
                first_words = rows.next_words
                jobs.append((part, rows))
            else:
                jobs.append((part, part.plan(op, chosen, self._by_slot)))
            if several:
                part.check_memory(jobs[-1][1])
        if chosen is None and not several:
            self._all_layers = jobs
        return jobs

    def prepare(
        self,
        op: str,
        names: tuple[str, str],
        jobs: list[Job],
        src_ids: torch.Tensor,
        dst_ids: torch.Tensor,
        src_positions: BlockIds | None = None,
        dst_positions: BlockIds | None = None,
        checksums: torch.Tensor | None = None,
    ) -> tuple[RowCall, torch.Tensor]:
        """Return what a run adds to its jobs, checked, and dst's ids for the kernels.

        ``op`` and ``names`` are the call and its ids for errors.
        """
        _check_counts(op, names, src_ids.numel(), dst_ids.numel(), self._num_tokens)
        call = RowCall()
        if self._by_row or not (src_positions is dst_positions is checksums is None):
            call.src_positions = self._positions(f"{op}: src_positions", src_positions, src_ids)
            call.dst_positions = self._positions(f"{op}: dst_positions", dst_positions, dst_ids)
        if checksums is not None:
            call.expected = self._sums(f"{op}: checksums", checksums, src_ids)
            call.actual = torch.zeros_like(call.expected)
        if self._checksum:
            call.sums = torch.zeros(dst_ids.numel(), dtype=torch.int64, device=dst_ids.device)
        name = f"{op}: {names[1]}"
        return call, self._overlap.check(name, jobs, src_ids, dst_ids, self._num_ids[0])

    def launch(
        self,
        jobs: list[Job],
        src_ids: torch.Tensor,
        dst_ids: torch.Tensor,
        call: RowCall,
        max_sms: int | None,
        engine: Engine,
    ) -> None:
        """Copy; if checksums are expected, the actual ones have been computed before."""
        for part, plan in jobs:
            sides = (part.src, part.dst)
            if isinstance(plan, RowPlan):
                transform(engine, *sides, plan, src_ids, dst_ids, call, self.bad, max_sms)
            else:
                execute(engine, *sides, plan, src_ids, dst_ids, self.bad, max_sms, self._gpu)

    def _positions(
        self, name: str, positions: BlockIds | None, ids: torch.Tensor
    ) -> torch.Tensor | None:
        if (positions is not None) != self._turns:
            wanted = "given for a plan with rope" if self._turns else "None for a plan without rope"
            raise InvalidArgument(f"{name} must be {wanted}, got {type(positions).__name__}")
        if positions is None:
            return None
        tensor = as_ids(name, positions, ids.device)
        if tensor.numel() != ids.numel():
            raise InvalidArgument(
                f"{name} must be as many as the ids ({ids.numel()}), got {tensor.numel()}"
            )
        return tensor

    def _sums(self, name: str, checksums: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if not self._checksum:
            raise InvalidArgument(f"{name} must be None for a plan without checksum, got a tensor")
        fits = (
            isinstance(checksums, torch.Tensor)
            and checksums.layout is torch.strided
            and not checksums.is_meta
            and checksums.dtype == torch.int64
            and checksums.shape == ids.shape
        )
        if not fits:
            got: Any = type(checksums).__name__
            if isinstance(checksums, torch.Tensor):
                got = f"{checksums.dtype} of shape {tuple(checksums.shape)}"
            raise InvalidArgument(f"{name} must be int64 of shape {tuple(ids.shape)}, got {got}")
        return to_device(name, checksums, ids.device)

    def _add_up(
        self,
        jobs: list[Job],
        src_ids: torch.Tensor,
        actual: torch.Tensor,
        max_sms: int | None,
        engine: Engine,
    ) -> None:
        """Add to ``actual`` the checksums of the blocks of src that are going to be copied."""
        if src_ids.device.type == "cpu" and not torch.compiler.is_compiling():
            self.bad.check(1, src_ids)  # under their name here
        for part, plan in jobs:
            assert isinstance(plan, RowPlan), "a plan with checksum goes by rows"
            add_checksums(engine, part.src, plan, src_ids, actual, self.bad, max_sms)


def check_jobs_engine(op: str, engine: Engine, jobs: list[Job]) -> None:
    """Raise unless a named engine runs these jobs."""
    if engine in MOVES_BYTES and any(isinstance(plan, RowPlan) for _, plan in jobs):
        raise Unavailable(
            f"{op}: engine {engine}: it moves bytes; convert, rope and checksum need another"
        )
    check_engine(op, engine, jobs[0][0].device)


def _check_counts(
    op: str, names: tuple[str, str], num_src: int, num_dst: int, num_tokens: tuple[int, int]
) -> None:
    src_size, dst_size = num_tokens
    src, dst = names
    if src_size == dst_size and num_src != num_dst:
        raise InvalidArgument(
            f"{op}: {dst} must have as many ids as {src} ({num_src}), got {num_dst}"
        )
    num_copied = min(num_src * src_size, num_dst * dst_size)
    if -(-num_copied // src_size) != num_src or -(-num_copied // dst_size) != num_dst:
        raise InvalidArgument(
            f"{op}: {dst} must hold the {num_src * src_size} tokens of {src}, give or take a part "
            f"of one block, got {num_dst} blocks of {dst_size}"
        )


class Copying:
    """A copy between two caches. The arguments and their errors are those of a ``CopyPlan``.

    Args:
        bad, slots_bad: where kernels report bad ids of blocks and of slots; None for objects of
            its own.

    Attributes:
        parts: the views that are copied.
        device: of the cache.
        blocks, slots: the runs over blocks, and those token by token.
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
        bad: BadIds | None = None,
        slots_bad: BadIds | None = None,
    ):
        check_transforms(convert, rope)
        check_checksum("CopyPlan", checksum)
        layers = as_layers("CopyPlan", layers)
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
        self.parts = [
            CopyPart(
                *(*views, layers, src_heads, dst_heads, convert),
                rope if index == 0 else None,
                several=several,
            )
            for index, views in enumerate(pairs)
        ]
        if convert is not None and not any(part.converts for part in self.parts):
            raise InvalidArgument(
                "CopyPlan: convert must be None where dst has src's dtype, got Fp8 for "
                f"{src_views[0].dtype}"
            )
        sizes = block_size_of(src_views), block_size_of(dst_views)
        for view in src_views + dst_views:
            if not view.has_tokens and sizes[0] != sizes[1]:
                raise InvalidArgument(
                    f"CopyPlan: dst must have src's block_size {sizes[0]} to take "
                    f"views without a 'token' axis, got {sizes[1]}"
                )
        self.device = self.parts[0].device
        parts, overlap, turns = self.parts, OverlapCheck(self.parts), rope is not None
        first_src, first_dst = src_views[0], dst_views[0]
        num_blocks = (first_src.num_blocks, first_dst.num_blocks)
        self.blocks = CopyRuns(
            *("CopyPlan.run", ("src_blocks", "dst_blocks"), parts, overlap, num_blocks, sizes),
            turns=turns,
            checksum=checksum,
            by_slot=False,
            bad=bad,
        )
        num_slots = (num_blocks[0] * sizes[0], num_blocks[1] * sizes[1])
        self.slots = CopyRuns(
            *("CopyPlan.run_slots", ("src_slots", "dst_slots"), parts, overlap, num_slots, (1, 1)),
            turns=turns,
            checksum=checksum,
            by_slot=True,
            bad=slots_bad,
        )


def check_checksum(op: str, checksum: bool) -> bool:
    """Refuse values that are truthy but not bool."""
    if not isinstance(checksum, bool):
        raise InvalidArgument(f"{op}: checksum must be True or False, got {checksum!r}")
    return checksum


def check_transforms(convert: Fp8 | None, rope: Rope | None, *, op: str = "CopyPlan") -> None:
    """Refuse anything but an ``Fp8`` and a ``Rope``."""
    for name, value, kind in (("convert", convert, Fp8), ("rope", rope, Rope)):
        if value is not None and not isinstance(value, kind):
            raise InvalidArgument(
                f"{op}: {name} must be mk.{kind.__name__} or None, got {type(value).__name__}"
            )
