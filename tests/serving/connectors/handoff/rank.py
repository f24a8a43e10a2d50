"""Ranks of two engines that hand requests over, with caches on the CPU and known contents."""

import hashlib
import time
from collections.abc import Mapping, Sequence

import torch

import mooncake_kernels as mk
from mooncake_serving.connectors.handoff import (
    REPLICATED,
    Endpoint,
    HandoffSettings,
    Receiver,
    Result,
    Sender,
    Source,
    first_head,
)

LAYERS, DIM, HEADS = 3, 8, 4
NHD, HND = "kv block token head dim", "kv block head token dim"
WAIT_S = 60.0


def settings_of(**changes) -> HandoffSettings:
    return HandoffSettings(**{"slot_bytes": 64 << 10, "num_slots": 4, **changes})


def digest_of(prompt: str) -> bytes:
    return hashlib.sha256(prompt.encode()).digest()


def contents_of(prompt: str, num_tokens: int, heads: int = HEADS) -> torch.Tensor:
    """Keys and values of a prompt: ``[layer, kv, token, head, dim]``, of all heads."""
    generator = torch.Generator().manual_seed(int.from_bytes(digest_of(prompt)[:4], "little"))
    return torch.randn((LAYERS, 2, num_tokens, heads, DIM), generator=generator)


class Rank:
    """A rank with a cache of one group, by default, and what it is for.

    Args:
        role: "sender", "receiver" or "both".
        shard: rank, and number of ranks.
        heads: of the model; ``REPLICATED`` for a cache without a head axis.
    """

    def __init__(
        self,
        role: str,
        *,
        shard: tuple[int, int] = (0, 1),
        heads: int = HEADS,
        block_size: int = 16,
        axes: str = NHD,
        num_blocks: int = 64,
        transports: Sequence[str] | None = None,
        settings: HandoffSettings | None = None,
        engine_id: str = "P",
        groups: mk.CacheGroups | None = None,
    ):
        self.shard, self.heads, self.block_size, self.axes = shard, heads, block_size, axes
        own = 1 if heads == REPLICATED else max(1, heads // shard[1])
        if heads == REPLICATED:
            self.axes = axes = " ".join(axis for axis in axes.split() if axis != "head")
        sizes = {"kv": 2, "block": num_blocks, "token": block_size, "head": own, "dim": DIM}
        self.layers = [
            torch.full([sizes[axis] for axis in axes.split()], float("nan")) for _ in range(LAYERS)
        ]
        self.view = mk.KVView(self.layers, axes)
        self.groups = groups or mk.CacheGroups(mk.CacheGroup("0", self.view))
        self.engine = mk.TransferEngine(transports=transports)
        self.endpoint = Endpoint(self.engine, settings or settings_of())
        self.first_head = first_head(heads, *shard)
        if role != "receiver":
            self.sender = Sender(
                self.endpoint,
                self.groups,
                engine_id=engine_id,
                first_head=dict.fromkeys(self.groups, self.first_head),
            )
        if role != "sender":
            self.receiver = Receiver(
                self.endpoint,
                self.groups,
                num_heads=dict.fromkeys(self.groups, heads),
                rank=shard[0],
                num_ranks=shard[1],
            )
        self.role = role
        self.endpoint.start()
        self.results: dict[str, Result] = {}

    @property
    def name(self) -> str:
        return self.engine.name

    def close(self) -> None:
        if self.role != "receiver":
            self.sender.close()
        if self.role != "sender":
            self.receiver.close()
        self.endpoint.close()
        self.engine.close()

    def __enter__(self) -> "Rank":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # --- contents -----------------------------------------------------------------------------

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _rows(self, layer: torch.Tensor, kv: int, block: int) -> torch.Tensor:
        """A block as ``[token, head, dim]``, whatever the layout."""
        part = layer[kv, block]
        if "head" not in self.axes:
            return part.unsqueeze(1)
        return part if self.axes == NHD else part.transpose(0, 1)

    def _own(self, contents: torch.Tensor) -> torch.Tensor:
        heads = max(1, self.view.num_heads)
        return contents[:, :, :, self.first_head : self.first_head + heads]

    def fill(
        self, prompt: str, ids: Sequence[int], first: int, stop: int, total: int,
        layers: Sequence[int] = range(LAYERS),
    ) -> None:  # fmt: skip
        """Compute tokens of a prompt, in some layers."""
        own = self._own(contents_of(prompt, total, self.heads or 1))
        for token in range(first, stop):
            block, place = ids[token // self.block_size], token % self.block_size
            for number in layers:
                for kv in (0, 1):
                    self._rows(self.layers[number], kv, block)[place] = own[number, kv, token]

    def read(self, ids: Sequence[int], first: int, stop: int) -> torch.Tensor:
        """Return tokens ``[layer, kv, token, head, dim]``."""
        blocks = torch.stack(
            [
                torch.stack(
                    [torch.cat([self._rows(layer, kv, block) for block in ids]) for kv in (0, 1)]
                )
                for layer in self.layers
            ]
        )
        return blocks[:, :, first:stop]

    def holds(self, prompt: str, ids: Sequence[int], total: int, first: int = 0) -> bool:
        """Whether it has a prompt's tokens from ``first`` on, bit by bit."""
        own = self._own(contents_of(prompt, total, self.heads or 1))[:, :, first:]
        return torch.equal(self.read(ids, first, total), own)

    # --- what an engine does ------------------------------------------------------------------

    def prefill(
        self, prompt: str, ids: Sequence[int], total: int, *, step: int = 0, offer: bool = True
    ) -> None:
        """Offer and compute a prompt, ``step`` tokens at a time."""
        if offer:
            self.sender.offer(prompt, digest_of(prompt), total)
        step = step or total
        for first in range(0, total, step):
            stop = min(first + step, total)
            self.fill(prompt, ids, first, stop, total)
            self.sender.progress(prompt, stop, {"0": ids})

    def ask(
        self, prompt: str, source: Source, ids: Sequence[int] | Mapping, total: int, **options
    ) -> None:
        block_ids = ids if isinstance(ids, Mapping) else {"0": ids}
        request_id = options.pop("request_id", prompt)
        digest = options.pop("digest", digest_of(prompt))
        self.receiver.receive(request_id, source, prompt, digest, block_ids, total, **options)

    def result(self, request_id: str, wait_s: float = WAIT_S) -> str | None:
        """Wait for the end of a request; return its error."""
        end = time.monotonic() + wait_s
        while request_id not in self.results:
            for result in self.receiver.take_results():
                assert result.request_id not in self.results, "each is reported once"
                self.results[result.request_id] = result
            if request_id not in self.results:
                assert time.monotonic() < end, f"{request_id} has not ended in {wait_s} s"
                time.sleep(0.002)
        return self.results[request_id].error

    def released(self, transfer_id: str, wait_s: float = WAIT_S) -> None:
        """Wait until a transfer's blocks are not needed any more."""
        end = time.monotonic() + wait_s
        seen: set[str] = set()
        while transfer_id not in seen:
            seen |= self.sender.take_released()
            assert time.monotonic() < end, f"{transfer_id} was not released in {wait_s} s"
            time.sleep(0.002)


def source_of(*ranks: Rank, engine_id: str = "P") -> Source:
    return Source(engine_id, [rank.name for rank in ranks])
