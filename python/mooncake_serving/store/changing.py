"""Copies added to some pools and then removed from others, so that none is missed in between."""

from collections.abc import Collection, Sequence

import numpy as np

from mooncake_kernels.pool import PutResult

from .copying import HERE, NO_HOLDER, copy_to, drop_from
from .directory import Member
from .node import Node
from .spreading import Copied


class ReplicaChange:
    """One change of the copies of n objects.

    Args:
        node: that asks the others.
        keys: ``[n, 2]`` uint64.
        members: who lives.
    """

    def __init__(self, node: Node, keys: np.ndarray, members: Sequence[Member]):
        self._node = node
        self._keys = keys
        self._members = members
        self._staying = {m.pool for m in members if m.pool and not m.is_draining}
        self._pools = [set(pools) for pools in node.listing.holders(keys)]
        self._copied = Copied(np.zeros(len(keys), np.int64))
        for i, pools in enumerate(self._pools):
            if not pools:
                self._copied.failed[i] = NO_HOLDER

    def run(self, added: Sequence[Member], removed: Collection[str]) -> Copied:
        """Copy to members, then remove from pools what all of them have."""
        for target in added:
            self._add(target, self._ready())
        if removed:
            if not added:
                self._confirm(removed)
            for pool in removed:
                self._remove(pool)
        self._copied.num_copies[:] = [len(pools & self._staying) for pools in self._pools]
        return self._copied

    def _ready(self) -> list[int]:
        return [i for i in range(len(self._keys)) if i not in self._copied.failed]

    def _add(self, target: Member, indices: list[int]) -> None:
        """Have a member take objects, or say that it has them."""
        pools = [sorted(self._pools[i]) for i in indices]
        results: Sequence[PutResult | str] = ["it is draining"] * len(indices)
        if not target.is_draining:
            results = copy_to(self._node, target, self._keys[indices], pools, self._members)
        for i, result in zip(indices, results, strict=True):
            if result in HERE:
                self._pools[i].add(target.pool)
                self._copied.num_made += result is PutResult.STORED
            else:
                reason = result.name if isinstance(result, PutResult) else result
                self._copied.failed[i] = f"{target.name}: {reason}"

    def _confirm(self, removed: Collection[str]) -> None:
        """Have one that keeps each object say that it has it: the directory may be wrong."""
        by_pool = {m.pool: m for m in self._members if not m.is_draining}
        keepers: dict[int, list[str]] = {}
        for i in self._ready():
            if self._pools[i].isdisjoint(removed):
                continue
            if kept := (self._pools[i] & self._staying).difference(removed):
                keepers[i] = sorted(kept)
            else:
                self._copied.failed[i] = "it is the last copy"
        while keepers:
            pool = next(iter(keepers.values()))[0]
            indices = [i for i, pools in keepers.items() if pools[0] == pool]
            self._add(by_pool[pool], indices)
            for i in indices:
                others = keepers.pop(i)[1:]
                if i in self._copied.failed and others:
                    del self._copied.failed[i]
                    keepers[i] = others

    def _remove(self, pool: str) -> None:
        indices = [i for i in self._ready() if pool in self._pools[i]]
        if not indices:
            return
        if reason := drop_from(self._node, pool, self._keys[indices], self._members):
            self._copied.failed.update(dict.fromkeys(indices, reason))
        else:
            for i in indices:
                self._pools[i].remove(pool)
