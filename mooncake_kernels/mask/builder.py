"""Build the rows of one rule repeatedly, for batches of changing lengths: for CUDA graphs."""

import copy
from typing import Any

from .._engine import Engine, choose
from .._tensors import is_captured, staged
from ..errors import InvalidArgument
from .batch import ChunkBatch
from .build import raise_if_unfit, run
from .mask_rows import MaskRows
from .program import check_arguments, compile_rule, each_own, tail_lengths
from .rule import Rule


class MaskBuilder:
    """Make the rows of a rule without waiting for the device, for batches up to a size.

    The rule is compiled once. The kernel reads the lengths on the device when it runs, so a CUDA
    graph that captured ``build()`` replays with the lengths last passed to ``set_lengths``::

        builder = mk.mask.MaskBuilder(rule, largest_batch)
        with torch.cuda.graph(graph):
            rows = builder.build()
            block_map = rows.block_map(128, 128, num_q_blocks=num_q // 128 + num_requests)
        for q_lens, kv_lens in steps:
            builder.set_lengths(q_lens, kv_lens)
            graph.replay()

    Rows that are built while a graph is captured follow the builder, as all that is made from them
    in the graph: after ``set_lengths`` they are valid again when the graph has been replayed. Other
    rows have lengths of their own, and keep them.

    Args:
        rule: what is seen; its parameters are fixed.
        batch: the first batch; the builder owns it from then on. Later ones have as many requests,
            at most as many queries, and positions if this one has.
        engine: "host", "cuda", "reference" or "auto", by where the batch is.

    Raises:
        InvalidArgument: as ``mask.rows``.
        Unavailable: the named engine is not available.
    """

    def __init__(self, rule: Rule, batch: ChunkBatch, *, engine: Engine = "auto") -> None:
        check_arguments("MaskBuilder", rule, batch)
        self.rule, self.batch = rule, batch
        self._max_num_q = batch.num_q
        self._engine = choose("MaskBuilder", engine, batch.device)
        self._program = compile_rule(rule, batch.kv_lens_list, batch.device)
        self._last: MaskRows | None = None

    def set_lengths(self, q_lens: Any, kv_lens: Any, positions: Any = None) -> None:
        """Set the lengths of the next batch, checked like those of a ``ChunkBatch``.

        They are copied to the device in the order of the current stream, without waiting for it;
        only lengths that are on a GPU are waited for.

        Raises:
            InvalidArgument: the batch is invalid, or too large.
        """
        own, new = self.batch, ChunkBatch(q_lens, kv_lens, positions, device="cpu")
        if new.num_requests != own.num_requests:
            raise InvalidArgument(
                f"MaskBuilder: q_lens must be of {own.num_requests} requests, got "
                f"{new.num_requests}"
            )
        if new.num_q > self._max_num_q:
            raise InvalidArgument(
                f"MaskBuilder: q_lens must sum to at most {self._max_num_q}, as for the first "
                f"batch, got {new.num_q}"
            )
        if (new.positions is None) != (own.positions is None):
            raise InvalidArgument(
                f"MaskBuilder: positions must be {'None' if own.positions is None else 'given'}, "
                "as for the first batch"
            )
        tail_lengths(each_own(self.rule, new.num_requests), new.kv_lens_list)
        targets = {name: getattr(own, name) for name in ("q_lens", "kv_lens", "cu_q")}
        if own.positions is not None:
            targets["positions"] = own.positions[: new.num_q]
        for name, target in targets.items():
            source = staged(f"MaskBuilder: {name}", getattr(new, name), own.device)
            target.copy_(source, non_blocking=True)
        own.num_q = new.num_q
        own.q_lens_list, own.kv_lens_list = new.q_lens_list, new.kv_lens_list

    def build(self) -> MaskRows:
        """Return the rows, without waiting: one launch on the current stream.

        Outside a graph that is being captured, also the copies of the lengths that the rows keep.
        There are as many as the first batch had; those beyond the current batch see nothing. A row
        that does not fit has intervals of -1; ``raise_if_unfit`` raises for it, and so do on the
        CPU those that use the rows.
        """
        # A replay must read the lengths that set_lengths() writes; other rows must not.
        batch = self.batch if is_captured() else _copied(self.batch)
        self._last = run(self.rule, self._program, batch, self._engine, self._max_num_q)
        return self._last

    def raise_if_unfit(self) -> None:
        """Raise for the first row of the last build or replay that does not fit.

        It waits for the device, unless the rule always fits.

        Raises:
            InvalidArgument: a row sees more than two runs of keys before a tree's drafts.
        """
        if self._last is not None and not self._program.always_fits:
            raise_if_unfit(self.rule, self._last)


def _copied(batch: ChunkBatch) -> ChunkBatch:
    own = copy.copy(batch)
    own.q_lens, own.kv_lens, own.cu_q = (
        lengths.clone() for lengths in (batch.q_lens, batch.kv_lens, batch.cu_q)
    )
    if batch.positions is not None:
        own.positions = batch.positions.clone()
    return own
