"""Build the rows of a batch from a rule. Public as ``mooncake_kernels.mask.rows``."""

import torch

from .. import _library
from .._engine import Engine, choose
from ..errors import InvalidArgument
from ..reference import mask as reference
from .batch import ChunkBatch
from .mask_rows import MaskRows
from .program import Program, check_arguments, compile_rule
from .rule import Rule

MAX_RUNS = 8  # of a set of keys during the evaluation; csrc/mask/key_set.h


def rows(rule: Rule, batch: ChunkBatch, *, engine: Engine = "auto") -> MaskRows:
    """Return exactly what each query of a batch sees under a rule.

    Equivalent to::

        for b, request in enumerate(batch):
            for query, position in enumerate(request.positions):
                for key in range(kv_lens[b]):
                    seen[b][query, key] = rule.sees(position, key)

    stored as two intervals and 64 bits per query, see ``MaskRows``, without an intermediate dense
    mask. On CUDA it is one launch on the current stream, without waiting for the result, unless the
    rule is one of the few compositions whose rows may not fit. For CUDA graphs use ``MaskBuilder``.

    Args:
        rule: what is seen.
        batch: the queries and keys.
        engine: "host", "cuda", "reference" or "auto", by where the batch is.

    Raises:
        InvalidArgument: a parameter of the rule does not have one value per request, a tree has
            more drafts than its request has keys, or a row does not fit (use ``mask.packed`` then).
        Unavailable: the named engine is not available.
    """
    check_arguments("mask.rows", rule, batch)
    program = compile_rule(rule, batch.kv_lens_list, batch.device)
    result = run(rule, program, batch, choose("mask.rows", engine, batch.device), batch.num_q)
    if not program.always_fits:
        raise_if_unfit(rule, result)
    return result


def run(rule: Rule, program: Program, batch: ChunkBatch, engine: str, num_rows: int) -> MaskRows:
    """Make ``num_rows`` rows; those beyond the batch see nothing.

    A row that does not fit has intervals of -1.
    """
    device = batch.device
    intervals = torch.empty(num_rows, 4, dtype=torch.int32, device=device)
    tail_bits = torch.empty(num_rows, dtype=torch.int64, device=device)
    tail_base = torch.empty(batch.num_requests, dtype=torch.int32, device=device)
    if engine == "reference":
        tails = torch.tensor(program.tails, dtype=torch.int32, device="cpu")
        tail_base.copy_(batch.kv_lens.cpu() - tails)
        first, second = reference.rows(rule, batch, tail_base)
        intervals.zero_()[: batch.num_q].copy_(first)
        tail_bits.zero_()[: batch.num_q].copy_(second)
    else:
        positions = batch.positions  # a MaskBuilder's batch may have spare ones
        positions = None if positions is None else positions[:num_rows]
        lengths = (batch.cu_q, batch.kv_lens, positions)
        _library.call(_library.mask_rows, program.words, *lengths, intervals, tail_bits, tail_base)
    return MaskRows(batch, intervals, tail_bits, tail_base)


def raise_if_unfit(rule: Rule, result: MaskRows) -> None:
    """Raise for the first row that does not fit; waits for the device."""
    unfit = (result.intervals[:, 0] < 0).nonzero()
    if not unfit.numel():
        return
    row = int(unfit[0])
    request = int(result.batch.request_of()[row])
    raise InvalidArgument(
        f"mask.rows: rule must see at most two runs of keys before a tree's drafts, got {rule}, by "
        f"which row {row}, query {row - int(result.batch.cu_q[request])} of request {request}, "
        f"sees more, or needs more than {MAX_RUNS} runs while it is evaluated; mask.packed(rule, "
        "batch) holds any rule"
    )
