"""The canonical form of a mask: two intervals of keys and 64 bits per query."""

from dataclasses import dataclass

import torch

from .._engine import Engine
from .batch import ChunkBatch
from .block_map import BlockMap, build
from .packed import PackedMask, packed_rows
from .request_rows import RequestRows, refuse_unfit
from .to_flashmask import to_flashmask
from .to_sdpa import to_bias, to_sdpa
from .to_xformers import to_xformers


@dataclass(frozen=True)
class MaskRows:
    """For each query of a batch, the keys of its request that it sees.

    Row ``r``, of request ``b``, sees key ``k`` (a position in its request) if and only if::

        lo0 <= k < hi0  or  lo1 <= k < hi1
        or (0 <= k - tail_base[b] < 64 and tail_bits[r] >> (k - tail_base[b]) & 1)

    where ``lo0, hi0, lo1, hi1 = intervals[r]``. The form is canonical: intervals lie within
    ``[0, kv_lens[b]]``, do not touch and ascend (``hi0 < lo1``); an empty one is ``(0, 0)`` and
    comes last; no tail bit is set at or past ``kv_lens[b]`` or inside an interval. The intervals
    are the first two runs of keys that the row sees; tail bits are the remaining runs. So two masks
    with the same ``tail_base`` are equal if and only if their tensors are.

    Attributes:
        batch: whose queries and keys these are.
        intervals: int32 ``[num_q, 4]``.
        tail_bits: int64 ``[num_q]``, bit j is key ``tail_base[b] + j``.
        tail_base: int32 ``[num_requests]``; ``kv_lens[b]`` where a request has no tail.
    """

    batch: ChunkBatch
    intervals: torch.Tensor
    tail_bits: torch.Tensor
    tail_base: torch.Tensor

    def requests(self) -> list[RequestRows]:
        """Return views of each request's rows.

        Raises:
            InvalidArgument: on the CPU, a row of a ``MaskBuilder`` that did not fit; so do all
                that use the rows.
        """
        refuse_unfit("MaskRows", self.intervals[: self.batch.num_q])
        q_lens, there = self.batch.q_lens_list, slice(self.batch.num_q)
        intervals, tail_bits = (
            self.intervals[there].split(q_lens),
            self.tail_bits[there].split(q_lens),
        )
        columns = (intervals, tail_bits, self.tail_base, self.batch.kv_lens_list)
        return [RequestRows(*request) for request in zip(*columns, strict=True)]

    def dense(self) -> list[torch.Tensor]:
        """Return the mask per request as bool ``[q_len, kv_len]``, True where a key is seen."""
        return [request.dense() for request in self.requests()]

    def block_map(
        self,
        block_q: int,
        block_kv: int,
        *,
        whole: bool = False,
        width: int | None = None,
        num_q_blocks: int | None = None,
        engine: Engine = "auto",
    ) -> BlockMap:
        """Say which tiles of ``block_q`` queries and ``block_kv`` keys are full, partial or empty.

        Args:
            block_q: rows of a q-block; it never mixes requests, so request b has
                ``ceil(q_lens[b] / block_q)`` of them.
            block_kv: keys of a tile.
            whole: never classify a tile as full if it extends past the last query or key of its
                request, as in FlexAttention's ``create_block_mask``, where padding is not seen. If
                False, only pairs that exist count.
            width: also make ``partial_indices`` and ``full_indices``, with this many entries per
                q-block, in the same launch; ``ceil(kv_len / block_kv)`` are enough. Tiles that do
                not fit are left out; ``num_partial`` and ``num_full`` reveal that. None: they are
                made on first use, as wide as the fullest row.
            num_q_blocks: how many q-blocks to have, for a CUDA graph that is replayed with other
                lengths: ``num_q // block_q + num_requests`` are always enough. Those that a batch
                does not use are empty. None: as many as there are.
            engine: "host", "cuda", "reference" or "auto", by where the rows are.

        Raises:
            InvalidArgument: a size is not positive; or a q-block can have over 63,161,283 rows,
                unless the engine is reference.
            Unavailable: the named engine is not available.
        """
        return build(self, block_q, block_kv, whole, width, num_q_blocks, engine)

    def packed(self, *, engine: Engine = "auto") -> PackedMask:
        """Return the mask as FlashInfer's packed bits; on CUDA one launch, without waiting."""
        return packed_rows(self, engine)

    to_bias = to_bias
    to_flashmask = to_flashmask
    to_sdpa = to_sdpa
    to_xformers = to_xformers
