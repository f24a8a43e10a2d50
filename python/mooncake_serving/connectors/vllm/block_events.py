"""What routers are told of the store: which blocks an engine can load from it, with their tokens.
Plain data, without vLLM.
"""

import contextlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..tier_store import FAILURES, TierStore
from .steps import Blocks, Stored, object_names

log = logging.getLogger("mooncake_serving.connectors.vllm")

LOOK_SECONDS = 0.1  # from one look for what has gone to the next
MAX_KNOWN = 1_000_000  # blocks, where no watch says which are gone

_Block = tuple[int, bytes]  # its group and hash


@dataclass(frozen=True)
class StoredBlocks:
    """Blocks of a request, one after the other, that can be loaded now.

    Attributes:
        request: of vLLM.
        group: its number.
        place: of the first of them in the request's block table.
        hashes: vLLM's.
        parent: the hash of the block before the first; None: there is none.
        tokens: of all of them.
    """

    request: Any
    group: int
    place: int
    hashes: list[bytes]
    parent: bytes | None
    tokens: list[int]


@dataclass(frozen=True)
class RemovedBlocks:
    """Blocks that can be loaded no more.

    Attributes:
        group: its number.
        hashes: vLLM's.
    """

    group: int
    hashes: list[bytes]


@dataclass(frozen=True)
class DescribedBlocks:
    """Blocks that are on their way from or to the store, and what an event says of them.

    Attributes:
        request: of vLLM.
        blocks: of it.
        parents: the hash of the block before each; None: there is none.
        tokens: of each.
    """

    request: Any
    blocks: Blocks
    parents: list[bytes | None]
    tokens: list[list[int]]

    def runs(self, chosen: Sequence[bool]) -> list[StoredBlocks]:
        """Return the chosen ones, each run of neighbours as one."""
        runs: list[StoredBlocks] = []
        end = -1
        columns = (chosen, self.blocks.places, self.blocks.hashes, self.parents, self.tokens)
        for is_chosen, place, name, parent, tokens in zip(*columns, strict=True):
            if not is_chosen:
                continue
            if place != end:
                group = self.blocks.group
                runs.append(StoredBlocks(self.request, group, place, [], parent, []))
            runs[-1].hashes.append(name)
            runs[-1].tokens.extend(tokens)
            end = place + 1
        return runs


@dataclass
class _Saving:
    described: list[DescribedBlocks]
    reported: Stored


class BlockEvents:
    """Collects which blocks the store has, of those that this engine has saved or loaded.

    A block counts once all its parts are there, and until one of them is gone. A watch says what is
    gone from the pool of this process, and the disk behind it, whoever removed or evicted it; of a
    cluster, in which other hosts may have the block, too. Without such a pool, nobody says so.

    Args:
        store: in which blocks are saved.
        num_shards: parts of a block that the store has as objects.
    """

    def __init__(self, store: TierStore, num_shards: int):
        self._shards = range(num_shards)
        self._epoch = b""
        self._watch = store.watch()
        self._look_at = 0.0
        self._has_failed = False
        self._known: dict[_Block, None] = {}  # those that routers were told of, oldest first
        self._next: list[DescribedBlocks] = []
        self._saving: dict[int, _Saving] = {}  # by number of a save
        self._loading: dict[str, list[DescribedBlocks]] = {}  # by request
        self._events: list[StoredBlocks | RemovedBlocks] = []

    @property
    def has_saving(self) -> bool:
        """Whether workers have not said yet what has become of a save."""
        return bool(self._next or self._saving)

    def will_save(self, described: DescribedBlocks) -> None:
        """Take blocks of the next save."""
        self._next.append(described)

    def begin_save(self, number: int) -> None:
        """Give all that was taken the number of its save."""
        self._saving[number] = _Saving(self._next, Stored())
        self._next = []

    def end_save(self, number: int, stored: Stored) -> None:
        """Take what workers report of a save: some of them, or all."""
        if (saving := self._saving.get(number)) is None:  # the engine was reset since
            return
        saving.reported = saving.reported.merged(stored)
        if saving.reported.num_workers < len(self._shards):
            return
        del self._saving[number]
        counts = iter(saving.reported.counts)
        for one in saving.described:
            there = [next(counts) == len(self._shards) for _ in one.blocks.ids]
            self._tell(one, there, again=False)

    def begin_load(self, name: str, described: list[DescribedBlocks]) -> None:
        """Take the blocks that a request loads."""
        self._loading[name] = described

    def end_load(self, name: str, *, has_failed: bool) -> None:
        """Take how a load has ended."""
        for one in self._loading.pop(name, ()):
            if not has_failed:
                # Also what routers know: vLLM has them forget it when its own cache is reset.
                self._tell(one, [True] * len(one.blocks.ids), again=True)

    def take(self) -> list[StoredBlocks | RemovedBlocks]:
        """Return what has changed since the last call."""
        if self._watch is not None and time.monotonic() >= self._look_at:
            self._look()
        events, self._events = self._events, []
        return events

    def reset(self, epoch: bytes) -> None:
        """Withdraw all blocks, since vLLM clears all only while none of its own is in use.

        Args:
            epoch: of the names from now on.
        """
        self._epoch = epoch
        self._next.clear()
        self._saving.clear()
        self._loading.clear()
        self._events = [one for one in self._events if isinstance(one, RemovedBlocks)]
        self._remove([*self._known])

    def close(self) -> None:
        """End the watch. Idempotent."""
        if self._watch is not None:
            self._watch.close()

    def _tell(self, described: DescribedBlocks, there: Sequence[bool], *, again: bool) -> None:
        blocks = described.blocks
        each = [(blocks.group, name) for name in blocks.hashes]
        if self._watch is not None and any(there):
            names = object_names(self._epoch, blocks.group, blocks.hashes, self._shards)
            tags = [(self._epoch, one) for one in each for _ in self._shards]
            self._look()  # what the watch has not seen until now, it would not miss either
            with self._failures_logged():
                # Some may have been evicted since.
                still: Any = self._watch.add(names, tags).reshape(len(each), -1).all(1).tolist()
                there = [a and b for a, b in zip(there, still, strict=True)]
        chosen = [
            ok and (again or one not in self._known) for one, ok in zip(each, there, strict=True)
        ]
        self._events += described.runs(chosen)
        self._known.update((one, None) for one, ok in zip(each, chosen, strict=True) if ok)
        while self._watch is None and len(self._known) > MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def _look(self) -> None:
        assert self._watch is not None
        self._look_at = time.monotonic() + LOOK_SECONDS
        with self._failures_logged():
            tags: Any = self._watch.gone()
            # Blocks of a former epoch were withdrawn, and may be stored again in this one.
            self._remove([one for epoch, one in tags if epoch == self._epoch])

    def _remove(self, gone: Sequence[_Block]) -> None:
        removed: dict[int, list[bytes]] = {}
        for one in gone:
            if one in self._known:  # else it has gone before, with another part
                del self._known[one]
                removed.setdefault(one[0], []).append(one[1])
        self._events += [RemovedBlocks(group, names) for group, names in removed.items()]

    @contextlib.contextmanager
    def _failures_logged(self) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            if not self._has_failed:
                log.warning("it is not known what has left the store: %s; logged once", error)
            self._has_failed = True
