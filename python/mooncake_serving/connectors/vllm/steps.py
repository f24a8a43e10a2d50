"""What the scheduler's side and the workers' sides send each other: plain data, without vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass, field

LOAD_TIMES = "load_times"  # among counts: the seconds of each load
NULL_BLOCK = 0  # vLLM's block id where a group needs none, as before a sliding window


@dataclass(frozen=True)
class GroupForm:
    """A group of layers with a block table of its own.

    Attributes:
        kind: "full", "window" or "state", see ``mooncake_kernels.kv.CacheGroup``.
        tokens_per_block: of its blocks.
        window: tokens that a query of a "window" group sees, itself included.
    """

    kind: str
    tokens_per_block: int
    window: int | None = None


@dataclass(frozen=True)
class Shards:
    """How the workers of an engine divide a block.

    Attributes:
        count: parts of a block with different contents, each an object of its own.
        number: of this worker's part.
        writes: whether this worker is the one that saves it: others have the same bytes.
    """

    count: int = 1
    number: int = 0
    writes: bool = True


@dataclass(frozen=True)
class Blocks:
    """Blocks of a request in one group.

    Attributes:
        group: its number.
        places: in the request's block table, ascending.
        ids: where they are in the engine's cache.
        hashes: vLLM's, of all tokens up to the end of each.
    """

    group: int
    places: list[int]
    ids: list[int]
    hashes: list[bytes]

    def cut(self, num_blocks: int) -> "list[Blocks]":
        """Return pieces of at most this many blocks."""
        return [
            Blocks(
                self.group,
                self.places[first : first + num_blocks],
                self.ids[first : first + num_blocks],
                self.hashes[first : first + num_blocks],
            )
            for first in range(0, len(self.ids), num_blocks)
        ]


@dataclass(frozen=True)
class Load:
    """What a request waits for."""

    request_id: str
    blocks: list[Blocks]


@dataclass(frozen=True)
class Save:
    """What a step has filled. The scheduler keeps the blocks until each worker has reported that
    it has copied those of this number.

    Attributes:
        number: of this save.
        blocks: to be saved.
        is_reported: whether workers report which of them the store has in the end.
    """

    number: int
    blocks: list[Blocks]
    is_reported: bool = False


@dataclass(frozen=True)
class Step:
    """The scheduler's instructions to the workers for a step.

    Attributes:
        namespace: of the store.
        epoch: at the head of all names: blocks of other weights have another one.
        loads: to begin.
        save: to begin when the step has computed; None: nothing.
    """

    namespace: str
    epoch: bytes
    loads: list[Load]
    save: Save | None


@dataclass(frozen=True)
class Stored:
    """What has become of a ``Save``.

    Attributes:
        num_workers: that report, of those that write.
        counts: how many of them have their part of each block in the store, in the save's order.
    """

    num_workers: int = 0
    counts: Sequence[int] = ()

    def merged(self, other: "Stored") -> "Stored":
        """Return what both report together."""
        if not self.num_workers or not other.num_workers:
            return self if self.num_workers else other
        counts = [a + b for a, b in zip(self.counts, other.counts, strict=True)]
        return Stored(self.num_workers + other.num_workers, counts)


@dataclass
class Report:
    """What workers report back.

    Attributes:
        copied: by number of a ``Save``: how many workers have copied it out of their caches.
        usable: by request whose load failed: the tokens before the first block that did not come.
        stored: by number of a ``Save`` of which that is reported.
    """

    copied: dict[int, int] = field(default_factory=dict)
    usable: dict[str, int] = field(default_factory=dict)
    stored: dict[int, Stored] = field(default_factory=dict)

    def merged(self, other: "Report") -> "Report":
        """Return what both report together."""
        copied = self.copied.copy()
        for number, count in other.copied.items():
            copied[number] = copied.get(number, 0) + count
        usable = self.usable.copy()
        for name, tokens in other.usable.items():
            usable[name] = min(tokens, usable.get(name, tokens))
        stored = self.stored.copy()
        for number, one in other.stored.items():
            stored[number] = one.merged(stored.get(number, Stored()))
        return Report(copied, usable, stored)


def object_names(
    epoch: bytes, group: int, hashes: Sequence[bytes], shards: Sequence[int]
) -> list[bytes]:
    """Return what the parts of blocks are called in the store: those of a block side by side."""
    heads = [epoch + group.to_bytes(2, "little") + shard.to_bytes(4, "little") for shard in shards]
    return [head + one for one in hashes for head in heads]
