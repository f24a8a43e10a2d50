"""What a ``CopyPlan`` and a ``Packer`` copy, checked once, and the runs that do it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .._tensors import have_addresses
from ..bad_ids import BadIds
from ..errors import InvalidArgument
from ..transforms import Fp8, Rope
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
from .overlap import OverlapCheck
from .row_plan import RowCall
from .view import KVView


@dataclass(frozen=True)
class RunOptions:
    """What a run takes besides ids; as for ``CopyPlan.run``."""

    layers: Layers = None
    src_positions: BlockIds | None = None
    dst_positions: BlockIds | None = None
    checksums: torch.Tensor | None = None


class CopyRuns:
    """Runs over ids of one kind: of blocks, or of slots.

    Args:
        op: the call that is made, for errors.
        names: of its ids, (src, dst).
        jobs: what a run consists of.
        overlap: refuses to read and write the same place.
        num_ids: exclusive upper bounds of the ids, (src, dst).
        num_tokens: of one id, (src, dst).
        by_slot: whether ids name slots.
        bad: where kernels report bad ids; None for an object of its own.

    Attributes:
        bad: the same.
    """

    def __init__(
        self,
        op: str,
        names: tuple[str, str],
        jobs: CopyJobs,
        overlap: OverlapCheck,
        num_ids: tuple[int, int],
        num_tokens: tuple[int, int],
        *,
        by_slot: bool,
        bad: BadIds | None = None,
    ):
        self._op, self._names, self._jobs, self._overlap = op, names, jobs, overlap
        self._num_ids, self._num_tokens, self._by_slot = num_ids, num_tokens, by_slot
        in_errors = (f"{op}: {names[0]}", f"{op}: {names[1]}")
        self.bad = BadIds(jobs.device, in_errors, num_ids) if bad is None else bad

    def run(
        self,
        src: BlockIds,
        dst: BlockIds,
        options: RunOptions,
        max_sms: int | None,
        engine: Engine,
    ) -> torch.Tensor | None:
        """Check and launch one run; return the checksums of what it has written, if any."""
        op, (src_name, dst_name) = self._op, self._names
        check_call(op, max_sms, engine)
        jobs = self.jobs(op, options.layers)
        check_jobs_engine(op, engine, jobs)
        device = self._jobs.device
        if device.type == "cuda":
            engine = self._jobs.choose(engine, jobs, (src, dst))
        num_src, num_dst = self._num_ids
        src_ids = as_ids(f"{op}: {src_name}", src, device, engine, num_ids=num_src)
        dst_ids = as_ids(f"{op}: {dst_name}", dst, device, engine, num_ids=num_dst)
        call, dst_ids = self.prepare(op, self._names, jobs, src_ids, dst_ids, options)
        if call.actual is not None:
            add_up_jobs(jobs, src_ids, call.actual, self.bad, max_sms, engine)
        run_jobs(jobs, src_ids, dst_ids, call, self.bad, max_sms, engine)
        return call.sums

    def jobs(self, op: str, layers: Layers = None) -> list[Job]:
        """Return the jobs of a run; ``op`` is the call for errors."""
        return self._jobs.of(op, layers, by_slot=self._by_slot)

    def prepare(
        self,
        op: str,
        names: tuple[str, str],
        jobs: list[Job],
        src_ids: torch.Tensor,
        dst_ids: torch.Tensor,
        options: RunOptions,
    ) -> tuple[RowCall, torch.Tensor]:
        """Return what a run adds to its jobs, checked, and dst's ids for the kernels.

        ``op`` and ``names`` are the call and its ids for errors.
        """
        _check_counts(op, names, src_ids.numel(), dst_ids.numel(), self._num_tokens)
        call = self._jobs.call(
            op, src_ids, dst_ids, options.src_positions, options.dst_positions, options.checksums
        )
        name = f"{op}: {names[1]}"
        return call, self._overlap.check(name, jobs, src_ids, dst_ids, self._num_ids[0])


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
        bad: where kernels report bad ids of blocks; None for an object of its own.

    Attributes:
        parts: the views that are copied.
        device: of the cache.
        blocks, slots: the runs over blocks, and those token by token.
        is_plain: whether a run moves the bytes of one view, and needs no other check than that of
            its ids.
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
        jobs = CopyJobs(self.parts, rope is not None, checksum)
        self.device = jobs.device
        overlap = OverlapCheck(self.parts)
        first_src, first_dst = src_views[0], dst_views[0]
        num_blocks = (first_src.num_blocks, first_dst.num_blocks)
        self.blocks = CopyRuns(
            *("CopyPlan.run", ("src_blocks", "dst_blocks"), jobs, overlap, num_blocks, sizes),
            by_slot=False,
            bad=bad,
        )
        num_slots = (num_blocks[0] * sizes[0], num_blocks[1] * sizes[1])
        self.slots = CopyRuns(
            *("CopyPlan.run_slots", ("src_slots", "dst_slots"), jobs, overlap, num_slots, (1, 1)),
            by_slot=True,
        )
        self.is_plain = not (several or jobs.by_row or overlap.is_needed) and have_addresses(
            [*first_src.tensors, *first_dst.tensors]
        )
