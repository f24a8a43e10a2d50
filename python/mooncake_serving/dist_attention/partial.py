"""Attention of a borrower's queries over the blocks that this instance holds for it."""

from collections.abc import Sequence

import torch

import mooncake_kernels as mk

from .geometry import Cache


class PartialAttention:
    """Attend to whole blocks of a cache, all of whose keys precede the queries.

    ::

        for queries of a part:  out, lse = attention to every key of the part's blocks, in order

    What depends on the lengths alone is kept for the next layer, which has the same.
    (Infinite-LLM, section 4.1: MicroAttention.)
    """

    def __init__(self, cache: Cache):
        self._cache = cache
        self._key: tuple | None = None
        self._rows: mk.MaskRows
        self._table: torch.Tensor

    def attend(
        self, layer_index: int, q: torch.Tensor, parts: Sequence[tuple[int, list[int]]]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend, part after part.

        Args:
            layer_index: of the cache.
            q: ``[num_rows, num_heads, head_dim]``.
            parts: how many of the rows, and the ids of their blocks, at least one.

        Returns:
            ``out`` like q, and ``lse``, float32 ``[num_rows, num_heads]``.
        """
        key = tuple((q_len, *block_ids) for q_len, block_ids in parts)
        if key != self._key:
            self._prepare(parts)
            self._key = key
        k_cache, v_cache = self._cache.layer(layer_index)
        return mk.paged_attention(q, k_cache, v_cache, self._table, self._rows)

    def _prepare(self, parts: Sequence[tuple[int, list[int]]]) -> None:
        """Make the mask and the table; a ``ChunkBatch`` has no request with more queries than keys.

        A part that has more, a chunk of a prompt over its first lent blocks, is several requests.
        """
        requests: list[tuple[int, list[int]]] = []
        for q_len, block_ids in parts:
            num_keys = len(block_ids) * self._cache.block_size
            for start in range(0, q_len, num_keys):
                requests.append((min(num_keys, q_len - start), block_ids))
        batch = mk.ChunkBatch(
            [q_len for q_len, _ in requests],
            [len(block_ids) * self._cache.block_size for _, block_ids in requests],
        )
        width = max(len(block_ids) for _, block_ids in requests)
        table = [[*ids, *[ids[0]] * (width - len(ids))] for _, ids in requests]
        self._rows = mk.mask.rows(mk.mask.full(), batch)
        self._table = torch.tensor(table, dtype=torch.int32)
