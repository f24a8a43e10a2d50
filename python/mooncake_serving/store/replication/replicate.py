"""Make copies of objects until there are enough, or move them; the last copy always stays."""

import contextlib
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import PutResult

from ..cluster import Node
from ..cluster.directory_entries import in_parts
from ..cluster.put import uniform_options
from ..directory import Holders, Member
from .placement import Placement, place

HERE = (PutResult.STORED, PutResult.EXISTS)
NO_HOLDER = "no living pool has it"
BATCH_KEYS = 128  # that one node is asked to take at once
BATCH_BYTES = 256 << 20
ANYWHERE = Placement(num_sampled=2, may_evict=True)
LAST_COPY = "it is the last copy"


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


class ReplicaChange:
    """One change of the copies of n objects.

    Args:
        node: sends the requests to the others.
        keys: ``[n, 2]`` uint64.
        members: the live members.
        options: ``[n]`` of ``PUT_OPTIONS``: how pools keep the copies; None: as after any put.
        hide: whether what leaves the node's own pool is hidden, see ``Store.hide_keys``.
    """

    def __init__(
        self,
        node: Node,
        keys: np.ndarray,
        members: Sequence[Member],
        options: np.ndarray | None = None,
        *,
        hide: bool = False,
    ):
        self._node = node
        self._hide = hide
        self._keys = keys
        self._options = uniform_options(len(keys)) if options is None else options
        self._members = members
        self._staying = {m.pool for m in members if m.pool and not m.is_draining}
        self._pools = [set(pools) for pools in node.entries.holders(keys)]
        self._copied = ReplicationResult(np.zeros(len(keys), np.int64))
        for i, pools in enumerate(self._pools):
            if not pools:
                self._copied.failed[i] = NO_HOLDER

    def run(self, added: Sequence[Member], removed: Collection[str]) -> ReplicationResult:
        """Copy to members, then remove from pools those objects that all of the members have."""
        for target in added:
            self._add(target, self._ready())
        for pool in removed:
            self._remove(pool, removed)
        self._copied.num_copies[:] = [len(pools & self._staying) for pools in self._pools]
        return self._copied

    def _ready(self) -> list[int]:
        return [i for i in range(len(self._keys)) if i not in self._copied.failed]

    def _add(self, target: Member, indices: list[int]) -> None:
        """Have a member take objects, or confirm that it has them."""
        pools = [sorted(self._pools[i]) for i in indices]
        results: Sequence[PutResult | str] = ["it is draining"] * len(indices)
        if not target.is_draining:
            results = copy_to(
                self._node,
                target,
                self._keys[indices],
                pools,
                self._members,
                self._options[indices],
            )
        for i, result in zip(indices, results, strict=True):
            if result in HERE:
                self._pools[i].add(target.pool)
                self._copied.num_made += result is PutResult.STORED
            else:
                self._copied.failed[i] = f"{target.name}: {_words(result)}"

    def _remove(self, pool: str, removed: Collection[str]) -> None:
        """Remove objects from a pool, but no last copy.

        Others may be giving up their copies at the same time. Each first withdraws its own, unless
        no other is listed, and only then looks for one that stays: so of two, at least one sees
        that the other goes, and one is listed all the while.
        """
        indices = [i for i in self._ready() if pool in self._pools[i]]
        if not indices:
            return
        with leaving(self._node, pool, self._keys[indices]) as (is_withdrawn, has_left):
            for i, is_going in zip(indices, is_withdrawn.tolist(), strict=True):
                if not is_going:
                    self._copied.failed[i] = LAST_COPY
            withdrawn = [i for i in indices if i not in self._copied.failed]
            self._confirm(withdrawn, removed)
            self._check_withdrawn(withdrawn, pool)
            going = [i for i in indices if i not in self._copied.failed]
            if not going:
                return
            if reason := drop_from(
                self._node, pool, self._keys[going], self._members, hide=self._hide
            ):
                self._copied.failed.update(dict.fromkeys(going, reason))
                return
            has_left[np.isin(indices, going)] = True
        for i in going:
            self._pools[i].remove(pool)

    def _confirm(self, indices: list[int], removed: Collection[str]) -> None:
        """Have one holder that keeps each object confirm it: the directory may be wrong."""
        by_pool = {m.pool: m for m in self._members if not m.is_draining}
        keepers: dict[int, list[str]] = {}
        for i, pools in zip(indices, self._holders(indices), strict=True):
            if staying := self._staying.intersection(pools).difference(removed):
                keepers[i] = sorted(staying)
            else:
                self._copied.failed[i] = LAST_COPY
        while keepers:
            pool = next(iter(keepers.values()))[0]
            asked = [i for i, pools in keepers.items() if pools[0] == pool]
            self._add(by_pool[pool], asked)
            for i in asked:
                others = keepers.pop(i)[1:]
                if i in self._copied.failed and others:
                    del self._copied.failed[i]
                    keepers[i] = others

    def _check_withdrawn(self, indices: list[int], pool: str) -> None:
        """Keep what one of the pool's nodes has published again: others may rely on it."""
        for i, pools in zip(indices, self._holders(indices), strict=True):
            if pool in pools:
                self._copied.failed.setdefault(i, "its pool has published it again")

    def _holders(self, indices: list[int]) -> Holders:
        return self._node.entries.holders(self._keys[indices])


def copy_to(
    node: Node,
    target: Member,
    keys: np.ndarray,
    pools: Sequence[Sequence[str]],
    members: Sequence[Member],
    options: np.ndarray | None = None,
) -> list[PutResult | str]:
    """Have a pool take n objects, each from the first holder that can provide it.

    Args:
        node: sends the requests; the pool may be its own.
        target: serves the pool; if it does not answer, others that serve the pool are asked.
        keys: ``[n, 2]``.
        pools: for each object, the names of the pools that have it.
        members: the live members.
        options: ``[n]`` of ``PUT_OPTIONS``: how the pool keeps them; None: as after any put.

    Returns:
        For each ``STORED`` or ``EXISTS``: the pool has it now; or why not.
    """
    options = uniform_options(len(keys)) if options is None else options
    if target.pool == node.pool_name:
        if node.copies is None:
            return [f"{node.name} has no pool"] * len(keys)
        return node.copies.copy(keys, [tuple(names) for names in pools], options)
    takers = [target.name]
    takers += [m.name for m in members if m.pool == target.pool and m.name != target.name]
    sources = [_sources(names, members, target) for names in pools]
    results: list[PutResult | str] = [NO_HOLDER] * len(keys)
    pending = [i for i in range(len(keys)) if sources[i]]
    while pending and takers:
        source = sources[pending[0]][0]
        asked = [i for i in pending if source in sources[i]]
        try:
            answers = node.client.pull(takers[0], keys[asked], source, options=options[asked])
        except (TransferError, Unavailable) as error:  # no other source would help
            for i in pending:
                results[i] = str(error)
            del takers[0]
            continue
        for i, answer in zip(asked, answers, strict=True):
            results[i] = answer
            sources[i].remove(source)
        pending = [i for i in pending if isinstance(results[i], str) and sources[i]]
    return results


def drop_from(
    node: Node, pool: str, keys: np.ndarray, members: Iterable[Member], *, hide: bool = False
) -> str:
    """Have a node that serves a pool remove objects from it: "", or why none has.

    ``hide``: in the own pool, by ``Store.hide_keys``.
    """
    if pool == node.pool_name and node.store is not None:
        if hide:
            node.store.hide_keys(keys)
        for first, second in [] if hide else keys.tolist():
            node.store.remove_key((first, second))
        node.entries.withdraw(keys)
        return ""
    reason = f"no node serves {pool}"
    for member in members:
        if member.pool == pool:
            try:
                node.client.drop(member.name, keys)
                return ""
            except (TransferError, Unavailable) as error:
                reason = str(error)
    return reason


@contextlib.contextmanager
def leaving(node: Node, pool: str, keys: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Withdraw those of ``[n, 2]`` objects from a pool that others have, so that they may leave it.

    Yields:
        ``[n]`` bool, which are withdrawn; and ``[n]`` bool, all false, to be set for those that
        have left. What was withdrawn and has not left is published again.

    Raises:
        Unavailable: the directory does not answer.
    """
    has_left = np.zeros(len(keys), bool)
    if pool == node.pool_name:  # it checks by itself what it has in the end
        with node.entries.leaving(keys) as is_withdrawn:
            yield is_withdrawn, has_left
        return
    is_withdrawn = np.ones(len(keys), bool)  # as far as is known, if there is no answer
    try:
        is_withdrawn = node.entries.give_up(pool, keys)
        yield is_withdrawn, has_left
    finally:
        with contextlib.suppress(Unavailable):  # the pool's nodes tell it at their next look
            for part in in_parts(keys[is_withdrawn & ~has_left]):
                node.directory.publish(pool, part, is_copy=True)


def _sources(pools: Iterable[str], members: Iterable[Member], target: Member) -> list[str]:
    """Names of nodes that serve pools, those of the target's host first."""
    serving = [m for m in members if m.pool in pools and m.pool != target.pool]
    random.shuffle(serving)
    return [m.name for m in sorted(serving, key=lambda m: m.host != target.host)]


def _words(result: PutResult | str) -> str:
    return result if isinstance(result, str) else result.name
