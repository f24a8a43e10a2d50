"""The meaning of a mask row, in elementwise torch, and one request's rows."""

from typing import NamedTuple

import torch

from .._tensors import have_addresses
from ..errors import InvalidArgument

TAIL_BITS = 64


def sees_intervals(
    lo0: torch.Tensor, hi0: torch.Tensor, lo1: torch.Tensor, hi1: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Tell which rows without tail bits see which keys; like ``sees``."""
    return (key >= lo0) & (key < hi0) | (key >= lo1) & (key < hi1)


def sees(
    lo0: torch.Tensor,
    hi0: torch.Tensor,
    lo1: torch.Tensor,
    hi1: torch.Tensor,
    tail_bits: torch.Tensor,
    tail_base: torch.Tensor,
    key: torch.Tensor,
) -> torch.Tensor:
    """Tell which rows see which keys; all arguments broadcast, and may be scalars."""
    bit = key - tail_base
    in_tail = (bit >= 0) & (bit < TAIL_BITS)
    is_set = (tail_bits >> bit.clamp(0, TAIL_BITS - 1).to(torch.int64)) & 1 != 0
    return sees_intervals(lo0, hi0, lo1, hi1, key) | in_tail & is_set


def refuse_unfit(op: str, intervals: torch.Tensor) -> None:
    """Refuse rows that their rule did not fit into; on a GPU nothing is read back."""
    if torch.compiler.is_compiling() or not have_addresses([intervals]) or not intervals.is_cpu:
        return
    ends = intervals[:, 1]
    if ends.numel() and int(ends.min()) < 0:
        row = int((ends < 0).nonzero()[0])
        raise InvalidArgument(
            f"{op}: rows must be of a rule that fits them, got intervals of "
            f"{intervals[row].tolist()} in row {row}: MaskBuilder.raise_if_unfit says why"
        )


class RequestRows(NamedTuple):
    """The rows of one request, as in ``MaskRows``."""

    intervals: torch.Tensor  # int32 [q_len, 4]
    tail_bits: torch.Tensor  # int64 [q_len]
    tail_base: torch.Tensor  # int32, 0-dimensional
    kv_len: int

    @property
    def q_len(self) -> int:
        """Count the queries."""
        return len(self.tail_bits)

    def dense(self, first_key: int = 0, num_keys: int | None = None) -> torch.Tensor:
        """Return bool ``[q_len, num_keys]``: which queries see the keys from ``first_key`` on."""
        end = self.kv_len if num_keys is None else first_key + num_keys
        keys = torch.arange(first_key, end, dtype=torch.int32, device=self.intervals.device)
        lo0, hi0, lo1, hi1 = self.intervals.unsqueeze(-1).unbind(1)
        return sees(lo0, hi0, lo1, hi1, self.tail_bits[:, None], self.tail_base, keys)

    def prefix_ends(self) -> torch.Tensor | None:
        """Return how many keys each query sees, int64, if those are a prefix; else None."""
        if bool(self.tail_bits.any()) or bool(self.intervals[:, [0, 2, 3]].any()):
            return None
        return self.intervals[:, 1].to(torch.int64)
