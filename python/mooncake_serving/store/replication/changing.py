"""Add copies to some pools, then remove them from others, so that none is missing in between."""

from collections.abc import Collection, Sequence

import numpy as np

from mooncake_kernels.pool import PutResult

from ..cluster import Node
from ..cluster.retention import uniform_options
from ..directory import Holders, Member
from .copying import HERE, NO_HOLDER, copy_to, drop_from, leaving
from .replicate import ReplicationResult

LAST_COPY = "it is the last copy"


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
                reason = result.name if isinstance(result, PutResult) else result
                self._copied.failed[i] = f"{target.name}: {reason}"

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
