"""Make copies of objects until there are enough: each on the next node that can take it."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncake_kernels.pool import PutResult

from ..cluster import Node
from ..directory import Member
from .copying import HERE, NO_HOLDER, copy_to
from .placement import Placement, place

BATCH_KEYS = 128  # that one node is asked to take at once
BATCH_BYTES = 256 << 20
ANYWHERE = Placement(num_sampled=2, may_evict=True)


@dataclass
class ReplicationResult:
    """Result of making copies of n objects.

    Attributes:
        num_copies: ``[n]``: how many pools have each now, without pools that are draining.
        num_made: copies made, of all objects together.
        failed: the last failure for objects that have too few copies, by index.
    """

    num_copies: np.ndarray
    num_made: int = 0
    failed: dict[int, str] = field(default_factory=dict)

    def of_each(self, which: np.ndarray) -> "ReplicationResult":
        """The same for objects of which some are named repeatedly: ``which[i]`` is the index here
        of the i-th.
        """
        failed = {i: self.failed[at] for i, at in enumerate(which.tolist()) if at in self.failed}
        return ReplicationResult(self.num_copies[which], self.num_made, failed)


class FreeBytes:
    """Free bytes of pools: as last reported, minus what they were given since."""

    def __init__(self) -> None:
        self._heard: dict[str, int] = {}  # by member
        self._given: dict[str, int] = defaultdict(int)  # by pool

    def of(self, members: Sequence[Member]) -> list[Member]:
        """The members, with the bytes that are free now."""
        for member in members:
            if self._heard.get(member.name) != member.free_bytes:
                self._heard[member.name] = member.free_bytes
                self._given[member.pool] = 0
        return [m.with_free(max(m.free_bytes - self._given[m.pool], 0)) for m in members]

    def give(self, pool: str, num_bytes: int) -> None:
        self._given[pool] += num_bytes


@dataclass
class ReplicationJob:
    """Makes copies of n objects until each has enough, or no node is left that could take one.

    Attributes:
        node: sends the requests to the others.
        placement: decides where copies go.
        room: free bytes, as far as known; kept from one batch to the next.
        num_copies: wanted of each object, in pools that are not draining.
        keys: ``[n, 2]`` uint64.
        num_bytes: ``[n]`` sizes; 0 where unknown: full pools are then asked, too.
        options: ``[n]`` of ``PUT_OPTIONS``: how pools keep the copies.
        bring_up_keys: loads ``[n, 2]`` objects into the node's own pool, to be copied from there,
            once it is known where to: ``[n]`` bool, which are there. None: they need not be.
    """

    node: Node
    placement: Placement
    room: FreeBytes
    num_copies: int
    keys: np.ndarray
    num_bytes: np.ndarray
    options: np.ndarray
    bring_up_keys: Callable[[np.ndarray], np.ndarray] | None = None

    def run(self) -> ReplicationResult:
        """Make the copies.

        Raises:
            Unavailable: the directory does not answer.
        """
        copied = ReplicationResult(np.zeros(len(self.keys), np.int64))
        for first in range(0, len(self.keys), BATCH_KEYS):
            members = self.node.directory.members()
            for pools, indices in self._lacking(first, members, copied).items():
                for part in self._parts(indices):
                    self._replicate(part, pools, members, copied)
        return copied

    def _lacking(
        self, first: int, members: Sequence[Member], copied: ReplicationResult
    ) -> dict[tuple[str, ...], list[int]]:
        """Objects of a batch that need copies, by the pools that have them."""
        staying = {m.pool for m in members if m.pool and not m.is_draining}
        lacking: dict[tuple[str, ...], list[int]] = defaultdict(list)
        holders = self.node.entries.holders(self.keys[first : first + BATCH_KEYS])
        for i, pools in enumerate(holders, first):
            copied.num_copies[i] = len(staying.intersection(pools))
            if copied.num_copies[i] < self.num_copies:
                copied.failed[i] = "no other pool has room" if pools else NO_HOLDER
                if pools:
                    lacking[tuple(pools)].append(i)
        return lacking

    def _parts(self, indices: Sequence[int]) -> Iterator[list[int]]:
        """Split what is too much for one request."""
        part: list[int] = []
        for i in indices:
            if part and self.num_bytes[[*part, i]].sum() > BATCH_BYTES:
                yield part
                part = []
            part.append(i)
        yield part

    def _replicate(
        self,
        indices: Sequence[int],
        pools: Sequence[str],
        members: Sequence[Member],
        copied: ReplicationResult,
    ) -> None:
        """Make copies of objects that the same pools have, on one node after another."""
        choices = place(
            self.room.of(members),
            len(members),
            int(self.num_bytes[indices].sum()),
            having=pools,
            placement=self.placement,
            seed=int(self.keys[indices[0], 0]),
        )
        if not choices and len(indices) > 1:  # no pool has room for all of them
            for i in indices:
                self._replicate([i], pools, members, copied)
        lacking = self._brought_up(indices, copied) if choices else []
        for target in (choice.member for choice in choices):
            holders = [pools] * len(lacking)
            results = copy_to(
                self.node, target, self.keys[lacking], holders, members, self.options[lacking]
            )
            for i, result in zip(list(lacking), results, strict=True):
                if result not in HERE:
                    copied.failed[i] = f"{target.name}: {_words(result)}"
                    continue
                copied.num_copies[i] += 1
                copied.num_made += result is PutResult.STORED
                self.room.give(target.pool, int(self.num_bytes[i]))
                if copied.num_copies[i] == self.num_copies:
                    lacking.remove(i)
                    del copied.failed[i]
            if not lacking:
                return

    def _brought_up(self, indices: Sequence[int], copied: ReplicationResult) -> list[int]:
        """Those that can be copied."""
        if self.bring_up_keys is None:
            return list(indices)
        is_up = self.bring_up_keys(self.keys[indices]).tolist()
        for i, up in zip(indices, is_up, strict=True):
            if not up:
                copied.failed[i] = "it could not be brought up from the disk"
        return [i for i, up in zip(indices, is_up, strict=True) if up]


def _words(result: PutResult | str) -> str:
    return result if isinstance(result, str) else result.name
