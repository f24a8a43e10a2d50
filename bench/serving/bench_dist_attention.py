"""The attention of one decode step with half of its keys at another instance.

`ours`: DistAttention. In each layer the query goes to a lender, in another process, which attends
to the first half of the context while this process attends to the second; both are merged. `local`:
the whole context in this process's cache, which is what memory permits only for shorter ones. Both
attend in every layer of the model; its matrix products, the same for both, are left out. The rows
have the bytes that a step moves, apart from messages of some 50 bytes, and those of the keys and
values at the lender, which an instance that fetched them would move.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib.harness import Case, arguments
from lib.processes import new_processes
from lib.table import report
from mooncake_serving.dist_attention import (
    DistAttention,
    Geometry,
    LoanLedger,
    LoanOptions,
    Member,
    Offer,
)
from mooncake_serving.dist_attention.engine.blocks import SharedAllocator
from mooncake_serving.engine import ModelConfig, PagedKVCache

BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


@dataclass(frozen=True)
class Shape:
    """Of a model's attention."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    def cache(self, num_tokens: int) -> PagedKVCache:
        config = ModelConfig(
            num_layers=self.num_layers,
            hidden_size=self.num_heads * self.head_dim,
            ffn_size=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            vocab_size=1,
            max_position=num_tokens,
            rms_eps=1e-5,
            rope_theta=1e4,
        )
        num_blocks = num_tokens // BLOCK_SIZE
        return PagedKVCache(config, num_blocks, block_size=BLOCK_SIZE, dtype=self.dtype)


SMOLLM2 = Shape("SmolLM2-135M", 30, 9, 3, 64, torch.float32)
LLAMA3 = Shape("Llama-3-8B", 32, 32, 8, 128, torch.bfloat16)


class Instance:
    """A member of a pool with a cache of its own."""

    def __init__(self, shape: Shape, num_tokens: int, transport: str):
        self.cache = shape.cache(num_tokens)
        self.transfer = mk.TransferEngine(transports=[transport])
        blocks = SharedAllocator(self.cache.num_blocks)
        geometry = Geometry.of(self.cache, shape.num_heads, max_rows=64)
        self.member = Member(
            self.transfer, self.cache, geometry, blocks, LoanLedger(), LoanOptions()
        )

    def close(self) -> None:
        self.member.close()
        self.transfer.close()


def lend(pipe: Any, shape: Shape, num_tokens: int, transport: str, num_threads: int) -> None:
    """The lender's process: it lends until the pipe is closed."""
    torch.set_num_threads(num_threads)
    instance = Instance(shape, num_tokens, transport)
    pipe.send(instance.transfer.name)
    pipe.recv()
    instance.close()


def case_of(shape: Shape, num_tokens: int, transport: str, num_threads: int) -> Iterator[Case]:
    """One row; the processes and caches live as long as it is measured."""
    context = new_processes()
    pipe, theirs = context.Pipe()
    half = num_tokens // 2
    arguments_of = (theirs, shape, half, transport, num_threads)
    process = context.Process(target=lend, args=arguments_of, daemon=True)
    process.start()
    home = Instance(shape, num_tokens, transport)
    try:
        yield measured(shape, home, pipe.recv(), num_tokens, transport)
    finally:
        home.close()
        pipe.send(None)
        process.join()


def measured(shape: Shape, home: Instance, lender: str, num_tokens: int, transport: str) -> Case:
    layers = range(shape.num_layers)
    for tensor in (part for index in layers for part in home.cache.layer(index)):
        tensor.normal_()
    num_blocks = num_tokens // BLOCK_SIZE
    lent = num_blocks // 2
    borrower = home.member.borrower
    [loan] = borrower.reserve(lent, [Offer(lender, lent)])
    while loan.num_stored < lent:
        borrower.store(loan, range(loan.num_stored, lent))

    q = torch.randn(shape.num_layers, 1, shape.num_heads, shape.head_dim).to(shape.dtype)
    table = torch.arange(num_blocks, dtype=torch.int32)[None]
    whole, rest = (
        mk.mask.rows(mk.mask.causal(), mk.ChunkBatch([1], [n * BLOCK_SIZE]))
        for n in (num_blocks, num_blocks - lent)
    )

    def local() -> list[torch.Tensor]:
        return [mk.paged_attention(q[i], *home.cache.layer(i), table, whole)[0] for i in layers]

    def ours() -> list[torch.Tensor]:
        attention = DistAttention(borrower, [1], [[loan]])
        outs = []
        for i in layers:
            k, v = home.cache.layer(i)
            outs.append(
                attention.attend(
                    i, q[i], lambda q, k=k, v=v: mk.paged_attention(q, k, v, table[:, lent:], rest)
                )[0]
            )
        return outs

    def check() -> None:
        atol = TOLERANCE[shape.dtype]
        torch.testing.assert_close(ours(), local(), rtol=atol, atol=atol)

    row_bytes = shape.num_heads * shape.head_dim * shape.dtype.itemsize
    moved = shape.num_layers * (2 * row_bytes + 4 * shape.num_heads)
    fields = {
        "context": num_tokens,
        "transport": transport,
        "moved_bytes": moved,
        "lent_bytes": lent * home.cache.num_bytes // num_blocks,
    }
    name = f"{shape.name}, {num_tokens:,} tokens, {transport}"
    return Case(name, ours, {"local": local}, check, fields=fields)


def all_cases(options: argparse.Namespace) -> Iterator[Case]:
    sizes = [(SMOLLM2, 1024), (SMOLLM2, 8192), (LLAMA3, 4096), (LLAMA3, 16384)]
    for shape, num_tokens in sizes[: 1 if options.quick else None]:
        for transport in ("shm", "tcp"):
            yield from case_of(shape, num_tokens, transport, options.threads)


if __name__ == "__main__":
    options = arguments(__doc__, without=("device",))
    report("dist_attention", all_cases(options), options)
