"""The launches of one run of a ``CopyPlan``: by bytes, or by rows if elements are processed."""

from collections.abc import Sequence
from typing import Any

import torch

from ..bad_ids import BadIds
from ..errors import InvalidArgument, Unavailable
from ..transforms import Fp8, Rope
from .choose import choose
from .copy_parts import CopyPart, Layers, as_layers, check_layers_alike
from .execute import (
    MOVES_BYTES,
    BlockIds,
    Engine,
    add_checksums,
    as_ids,
    check_engine,
    check_memory,
    execute,
    to_device,
    transform,
)
from .row_plan import RowCall, RowPlan
from .view import BlockPlan

Job = tuple[CopyPart, BlockPlan | RowPlan]


class CopyJobs:
    """The parts that a plan's runs consist of.

    Args:
        parts: the views that are copied.
        turns: whether keys are rotated.
        checksum: whether blocks are summed.

    Attributes:
        device: of the cache.
        by_row: whether elements are processed rather than only bytes moved.
    """

    def __init__(self, parts: Sequence[CopyPart], turns: bool, checksum: bool):
        self._parts, self._turns, self._checksum = parts, turns, checksum
        self.device = parts[0].device
        self.by_row = turns or checksum or any(part.looks_at_elements for part in parts)

    def of(self, op: str, layers: Layers, *, by_slot: bool) -> list[Job]:
        """Return the jobs of a run, all of them checked before the first byte moves."""
        several = len(self._parts) > 1
        layers = as_layers(op, layers)
        if several and layers is not None:
            check_layers_alike(op, [part.src for part in self._parts])
        jobs: list[Job] = []
        first_words = (0, 0)
        for part in self._parts:
            if part.looks_at_elements or self._checksum:
                rows = part.row_plan(op, layers, by_slot, first_words)
                first_words = rows.next_words
                jobs.append((part, rows))
            else:
                jobs.append((part, part.plan(op, layers, by_slot)))
            if several:
                check_memory(part.src, part.dst, jobs[-1][1])
        return jobs

    def choose(self, engine: Engine, jobs: list[Job], ids: Sequence[Any]) -> Engine:
        """Return the engine of a run on a GPU, given the ids as the caller passed them."""
        first = jobs[0][0]
        return choose(engine, first.src, first.dst, [plan for _, plan in jobs], ids)

    def call(
        self,
        op: str,
        src_ids: torch.Tensor,
        dst_ids: torch.Tensor,
        src_positions: BlockIds | None,
        dst_positions: BlockIds | None,
        checksums: torch.Tensor | None,
    ) -> RowCall:
        """Return what a run adds to the plan, checked."""
        call = RowCall()
        given = (src_positions, dst_positions, checksums)
        if not self.by_row and given == (None, None, None):
            return call
        call.src_positions = self._positions(f"{op}: src_positions", src_positions, src_ids)
        call.dst_positions = self._positions(f"{op}: dst_positions", dst_positions, dst_ids)
        if checksums is not None:
            call.expected = self._sums(f"{op}: checksums", checksums, src_ids)
            call.actual = torch.zeros_like(call.expected)
        if self._checksum:
            call.sums = torch.zeros(dst_ids.numel(), dtype=torch.int64, device=dst_ids.device)
        return call

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


def check_jobs_engine(op: str, engine: Engine, jobs: list[Job]) -> None:
    """Raise unless a named engine runs these jobs."""
    if engine in MOVES_BYTES and any(isinstance(plan, RowPlan) for _, plan in jobs):
        raise Unavailable(
            f"{op}: engine {engine}: it moves bytes; convert, rope and checksum need another"
        )
    check_engine(op, engine, jobs[0][0].device)


def add_up_jobs(
    jobs: list[Job],
    src_ids: torch.Tensor,
    actual: torch.Tensor,
    bad: BadIds,
    max_sms: int | None,
    engine: Engine,
) -> None:
    """Add to ``actual`` the checksums of the blocks of src that are going to be copied."""
    if src_ids.device.type == "cpu" and not torch.compiler.is_compiling():
        bad.check(1, src_ids)  # under their name here
    for part, plan in jobs:
        assert isinstance(plan, RowPlan), "a plan with checksum goes by rows"
        add_checksums(engine, part.src, plan, src_ids, actual, bad, max_sms)


def run_jobs(
    jobs: list[Job],
    src_ids: torch.Tensor,
    dst_ids: torch.Tensor,
    call: RowCall,
    bad: BadIds,
    max_sms: int | None,
    engine: Engine,
) -> None:
    """Copy; if checksums are expected, the actual ones have been computed before."""
    for part, plan in jobs:
        sides = (part.src, part.dst)
        if isinstance(plan, RowPlan):
            transform(engine, *sides, plan, src_ids, dst_ids, call, bad, max_sms)
        else:
            execute(engine, *sides, plan, src_ids, dst_ids, bad, max_sms)


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
