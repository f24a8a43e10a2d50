"""Attention of one step over keys in several instances (Infinite-LLM, section 4.1)."""

from collections.abc import Callable, Sequence

import torch

import mooncake_kernels as mk

from ..rpc import Call
from .borrower import Borrowed, Borrower
from .messages import Part

AttendHere = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class DistAttention:
    """Merge what this instance's keys give with what its lenders' give.

    ::

        for each lender: send it the queries of the requests whose first keys it has
        out, lse = attend_here(q)                     # meanwhile the lenders work
        for each lender: wait for its part
        out[row] = merge(out[row], the row's parts)

    Args:
        borrower: asks the lenders.
        q_lens: queries of each request of the step.
        loans: what each request has borrowed; a loan without contents is not asked for.
    """

    def __init__(
        self, borrower: Borrower, q_lens: Sequence[int], loans: Sequence[Sequence[Borrowed]]
    ):
        self._borrower = borrower
        self._parts: dict[str, list[Part]] = {}
        rows: dict[str, list[torch.Tensor]] = {}
        start = 0
        for q_len, of_one in zip(q_lens, loans, strict=True):
            for loan in of_one:
                if loan.num_stored:
                    part = Part(loan.number, q_len, loan.num_stored)
                    self._parts.setdefault(loan.lender, []).append(part)
                    rows.setdefault(loan.lender, []).append(torch.arange(start, start + q_len))
            start += q_len
        self._rows = {name: torch.cat(of_one) for name, of_one in rows.items()}
        all_rows = torch.cat(list(self._rows.values())) if rows else torch.empty(0).long()
        self._lent_rows = all_rows.unique()  # sorted
        self._places = {
            name: torch.searchsorted(self._lent_rows, of_one) for name, of_one in self._rows.items()
        }

    def attend(
        self, layer_index: int, q: torch.Tensor, attend_here: AttendHere
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend with ``[num_rows, num_heads, head_dim]`` queries of one layer.

        Returns:
            ``out`` like q, and ``lse``, float32 ``[num_rows, num_heads]``.

        Raises:
            LenderFailed: one of the lenders; what it held is lost.
        """
        calls: list[Call] = []
        try:
            for name, rows in self._rows.items():
                parts = self._parts[name]
                calls.append(self._borrower.start_attention(name, layer_index, q[rows], parts))
            out, lse = attend_here(q)
            if calls:
                self._merge(calls, out, lse)
        finally:
            self._borrower.end_calls(calls)
        return out, lse

    def _merge(self, calls: list[Call], out: torch.Tensor, lse: torch.Tensor) -> None:
        """Replace the rows with lent keys; a row has no part of some of the lenders."""
        rows = self._lent_rows
        outs = out.new_zeros(1 + len(calls), len(rows), *out.shape[1:])
        lses = lse.new_full((1 + len(calls), len(rows), lse.shape[1]), -torch.inf)
        outs[0], lses[0] = out[rows], lse[rows]
        for index, call in enumerate(calls, start=1):
            places = self._places[call.name]
            theirs = self._borrower.finish_attention(call, len(places))
            outs[index, places], lses[index, places] = theirs
        out[rows], lse[rows] = mk.merge_attention(outs, lses)
