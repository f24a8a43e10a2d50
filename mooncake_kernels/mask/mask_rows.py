"""The canonical form of a mask: for each query two intervals of keys, and 64 bits."""

from dataclasses import dataclass

import torch

from .batch import ChunkBatch
from .block_map import BlockMap, build
from .packed import PackedMask, packed_rows
from .request_rows import RequestRows
from .to_flashmask import to_flashmask
from .to_sdpa import to_bias, to_sdpa
from .to_xformers import to_xformers


@dataclass(frozen=True)
class MaskRows:
    """Say for each query of a batch which keys of its request it sees.

    Row ``r``, of request ``b``, sees key ``k`` (a position in its request) if and only if::

        lo0 <= k < hi0  or  lo1 <= k < hi1
        or (0 <= k - tail_base[b] < 64 and tail_bits[r] >> (k - tail_base[b]) & 1)

    where ``lo0, hi0, lo1, hi1 = intervals[r]``. The form is canonical: intervals lie within
    ``[0, kv_lens[b]]``, do not touch and ascend (``hi0 < lo1``); an empty one is ``(0, 0)`` and
    comes last; no tail bit is set that is at or past ``kv_lens[b]`` or inside an interval. The
    intervals are the first two runs of keys that the row sees, and tail bits the runs that follow.
    So two masks with the same ``tail_base`` are the same if and only if their tensors are.

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
        """Return views of each request's rows."""
        q_lens, there = self.batch.q_lens_list, slice(self.batch.num_q)
        intervals, tail_bits = (
            self.intervals[there].split(q_lens),
            self.tail_bits[there].split(q_lens),
        )
        columns = (intervals, tail_bits, self.tail_base, self.batch.kv_lens_list)
        return [RequestRows(*request) for request in zip(*columns, strict=True)]

    def dense(self) -> list[torch.Tensor]:
        """Return the mask as bool ``[q_len, kv_len]``, True where a query sees a key, a request."""
        return [request.dense() for request in self.requests()]

    def block_map(
        self,
        block_q: int,
        block_kv: int,
        *,
        whole: bool = False,
        width: int | None = None,
        num_q_blocks: int | None = None,
        engine: str = "auto",
    ) -> BlockMap:
        """Say which tiles of ``block_q`` queries and ``block_kv`` keys are full, partial or empty.

        Args:
            block_q: rows of a q-block; one never mixes requests, so that request b has
                ``ceil(q_lens[b] / block_q)`` of them.
            block_kv: keys of a tile.
            whole: call no tile full that reaches past the last query or key of its request, as
                FlexAttention's ``create_block_mask`` does, to which padding is not seen. Else the
                pairs that exist decide.
            width: also make ``partial_indices`` and ``full_indices``, with so many entries a
                q-block, in the same launch; ``ceil(kv_len / block_kv)`` are enough. What has no
                room is left out, as ``num_partial`` and ``num_full`` tell. None: they are made when
                asked for, as wide as the fullest.
            num_q_blocks: how many q-blocks to have, for a CUDA graph that is replayed with other
                lengths: ``num_q // block_q + num_requests`` are enough for any. Those that a batch
                does not have are empty. None: as many as there are.
            engine: "host", "cuda", "reference" or "auto", by where the rows are.

        Raises:
            InvalidArgument: a size is not positive.
            Unavailable: the named engine is not here.
        """
        return build(self, block_q, block_kv, whole, width, num_q_blocks, engine)

    def packed(self, *, engine: str = "auto") -> PackedMask:
        """Return the mask as FlashInfer's packed bits; on CUDA one launch, not waited for."""
        return packed_rows(self, engine)

    to_bias = to_bias
    to_flashmask = to_flashmask
    to_sdpa = to_sdpa
    to_xformers = to_xformers
