"""The operators of a resolved plan: a kernel or the host, or lists for copy engines."""

from collections.abc import Sequence
from typing import Protocol

import torch

from .. import _library
from .row_plan import RowPlan
from .view import BlockPlan

CHECK, COUNT, EACH, COPY_ENGINE = range(4)  # csrc/ops/copy_listed.cc

Ids = torch.Tensor | None


class Place(Protocol):
    """The location of one side of a resolved plan."""

    @property
    def registered(self) -> Sequence[torch.Tensor]:
        """The tensors whose addresses are in the plan; empty if they are relative to ``base``."""

    @property
    def base(self) -> int:
        """The offset added to the plan's addresses."""


def copy_listed(
    plan: BlockPlan, src: Place, dst: Place, src_ids: Ids, dst_ids: Ids, how: int, gpu: int
) -> int:
    """Check the ids, which are on the CPU, list the runs, merging neighbours, and copy them.

    ``CHECK`` and ``COUNT`` copy nothing, ``EACH`` makes one memcpy per range, ``COPY_ENGINE`` one
    batch of all. Returns the number of ranges, 0 for ``CHECK``.
    """
    table = plan.resolved(src.registered, dst.registered, gpu)
    arguments = (table, src.base, dst.base, src_ids, dst_ids, how, gpu)
    return _library.call(_library.copy_listed, *arguments)


def copy_by_kernel(
    plan: BlockPlan | RowPlan,
    src: Place,
    dst: Place,
    src_ids: Ids,
    dst_ids: Ids,
    bad_address: int,
    max_sms: int,
    gpu: int,
    bulk: bool = False,
) -> None:
    """Copy where the ids are: on the CPU, or queued on the current stream of their GPU."""
    table = plan.resolved(src.registered, dst.registered, gpu)
    copy, src_base, dst_base = _library.copy_resolved, src.base, dst.base
    try:
        if bulk:
            copy(table, src_base, dst_base, src_ids, dst_ids, bad_address, max_sms, True)
        else:  # each extra argument costs time
            copy(table, src_base, dst_base, src_ids, dst_ids, bad_address, max_sms)
    except (ValueError, RuntimeError) as error:
        raise _library.converted(error) from None
