"""The work of one step: a chunk of each of several requests, flattened."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mooncake_kernels.errors import InvalidArgument


class Chunk(NamedTuple):
    """The tokens of one request that one step computes; a decode is a chunk of one token."""

    token_ids: Sequence[int]
    start: int  # position of the first token; the keys and values before it are in the cache
    block_ids: Sequence[int]  # the request's blocks, in order, up to the chunk's end at least
    num_lent: int = 0  # first tokens whose blocks other instances hold; block_ids follow them


@dataclass(frozen=True)
class Batch:
    """Describe a mixed batch of prefill chunks and decodes; index tensors are int64."""

    token_ids: torch.Tensor  # [num_tokens], request after request
    positions: torch.Tensor  # [num_tokens]
    slots: torch.Tensor  # [num_tokens]: where each token's keys and values are written
    block_tables: torch.Tensor  # [num_requests, max_blocks]; a short row repeats its first block
    q_lens: tuple[int, ...]  # tokens computed now, by request
    kv_lens: tuple[int, ...]  # tokens attended to in this cache, those included
    block_size: int

    @classmethod
    def build(
        cls, chunks: Sequence[Chunk], block_size: int, device: torch.device | str = "cpu"
    ) -> "Batch":
        """Flatten chunks, one a request.

        Raises:
            InvalidArgument: no chunks, a chunk without tokens, or blocks that end before its
                tokens.
        """
        if not chunks:
            raise InvalidArgument("Batch.build: chunks must not be empty, got []")
        for index, chunk in enumerate(chunks):
            _check(index, chunk, block_size)
        q_lens = tuple(len(chunk.token_ids) for chunk in chunks)
        starts = [chunk.start - chunk.num_lent for chunk in chunks]  # in block_ids
        kv_lens = tuple(start + q for start, q in zip(starts, q_lens, strict=True))
        tables = [
            chunk.block_ids[: -(-kv // block_size)]
            for chunk, kv in zip(chunks, kv_lens, strict=True)
        ]
        width = max(map(len, tables))
        padded = [[*table, *[table[0]] * (width - len(table))] for table in tables]
        block_tables = torch.tensor(padded)

        request_index = torch.repeat_interleave(torch.tensor(q_lens))
        places = torch.cat(
            [torch.arange(start, kv) for start, kv in zip(starts, kv_lens, strict=True)]
        )
        blocks = block_tables[request_index, places // block_size]
        num_lent = torch.tensor([chunk.num_lent for chunk in chunks])
        return cls(
            token_ids=torch.tensor([t for c in chunks for t in c.token_ids], device=device),
            positions=(places + num_lent[request_index]).to(device),
            slots=(blocks * block_size + places % block_size).to(device),
            block_tables=block_tables.to(device),
            q_lens=q_lens,
            kv_lens=kv_lens,
            block_size=block_size,
        )

    @property
    def row_starts(self) -> list[int]:
        """Return where each request's tokens begin, and at the end the number of tokens."""
        starts = [0]
        for q_len in self.q_lens:
            starts.append(starts[-1] + q_len)
        return starts


def _check(index: int, chunk: Chunk, block_size: int) -> None:
    if not chunk.token_ids:
        raise InvalidArgument(f"Batch.build: chunks[{index}].token_ids must not be empty, got []")
    if chunk.start < 0:
        raise InvalidArgument(f"Batch.build: chunks[{index}].start must be >= 0, got {chunk.start}")
    if not 0 <= chunk.num_lent <= chunk.start or chunk.num_lent % block_size:
        raise InvalidArgument(
            f"Batch.build: chunks[{index}].num_lent must be whole blocks of {block_size} tokens "
            f"before {chunk.start}, got {chunk.num_lent}"
        )
    needed = chunk.start - chunk.num_lent + len(chunk.token_ids)
    capacity = len(chunk.block_ids) * block_size
    if capacity < needed:
        raise InvalidArgument(
            f"Batch.build: chunks[{index}].block_ids must hold {needed} tokens, "
            f"got {len(chunk.block_ids)} blocks of {block_size}"
        )
