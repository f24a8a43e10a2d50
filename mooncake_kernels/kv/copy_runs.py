"""The runs of a ``CopyPlan``: what they are given is checked, then they are launched."""

from dataclasses import dataclass

import torch

from ..bad_ids import BadIds
from ..errors import InvalidArgument
from .copy_jobs import CopyJobs, Job, add_up_jobs, check_jobs_engine, run_jobs
from .copy_parts import Layers
from .execute import BlockIds, Engine, as_ids, check_call
from .overlap import Apart
from .row_plan import RowCall


@dataclass(frozen=True)
class Given:
    """What a run may be given besides ids; as for ``CopyPlan.run``."""

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
        apart: refuses to read and write the same place.
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
        apart: Apart,
        num_ids: tuple[int, int],
        num_tokens: tuple[int, int],
        *,
        by_slot: bool,
        bad: BadIds | None = None,
    ):
        self._op, self._names, self._jobs, self._apart = op, names, jobs, apart
        self._num_ids, self._num_tokens, self._by_slot = num_ids, num_tokens, by_slot
        in_errors = (f"{op}: {names[0]}", f"{op}: {names[1]}")
        self.bad = BadIds(jobs.device, in_errors, num_ids) if bad is None else bad

    def run(
        self,
        src: BlockIds,
        dst: BlockIds,
        given: Given,
        max_sms: int | None,
        engine: Engine,
    ) -> torch.Tensor | None:
        """Check and launch one run; return the checksums of what it has written, if any."""
        op, (src_name, dst_name) = self._op, self._names
        check_call(op, max_sms, engine)
        jobs = self.jobs(op, given.layers)
        check_jobs_engine(op, engine, jobs)
        device = self._jobs.device
        if device.type == "cuda":
            engine = self._jobs.choose(engine, jobs, (src, dst))
        num_src, num_dst = self._num_ids
        src_ids = as_ids(f"{op}: {src_name}", src, device, engine, num_ids=num_src)
        dst_ids = as_ids(f"{op}: {dst_name}", dst, device, engine, num_ids=num_dst)
        call, dst_ids = self.prepare(op, self._names, jobs, src_ids, dst_ids, given)
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
        given: Given,
    ) -> tuple[RowCall, torch.Tensor]:
        """Return what a run adds to its jobs, checked, and dst's ids for the kernels.

        ``op`` and ``names`` are the call and its ids for errors.
        """
        _check_counts(op, names, src_ids.numel(), dst_ids.numel(), self._num_tokens)
        call = self._jobs.call(
            op, src_ids, dst_ids, given.src_positions, given.dst_positions, given.checksums
        )
        name = f"{op}: {names[1]}"
        return call, self._apart.check(name, jobs, src_ids, dst_ids, self._num_ids[0])


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
