"""The index in several shards, one of which can answer for a whole request."""

from collections.abc import Iterable, Sequence
from operator import index

import numpy as np

from ..errors import check_count, check_index, check_instance, check_keys, listed
from .event_order import EventOrder
from .events import KVEvent
from .prefix_index import PrefixIndex

MIX = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio (Knuth 6.4): keys may be small numbers


class ShardedIndex:
    """Blocks in ``num_shards`` indexes, by the prefix that they belong to.

    A chain is in the shard of its block ``depth - 1``, so that one shard answers for a whole
    request. The blocks before it, which chains of several shards share (a system prompt), are in
    all shards. An evicted key does not tell which chain it belonged to: a process that receives
    events has a map from keys to shards, which a process that only queries does not need.

    Args:
        num_instances: that may hold blocks.
        num_shards: number of parts, each of which could be a process of its own.
        depth: the block that decides. If many prompts begin alike, it must lie after the common
            part.
    """

    def __init__(
        self, num_instances: int, num_shards: int, *, depth: int = 1, max_waiting_events: int = 1024
    ) -> None:
        check_count("ShardedIndex", "num_shards", num_shards, 1)
        check_count("ShardedIndex", "depth", depth, 1)
        self.shards = [PrefixIndex(num_instances) for _ in range(num_shards)]
        self.depth = depth
        self._shard_of_key: dict[int, int] = {}  # of blocks that are in a single shard
        self._order = EventOrder(max_waiting_events)

    @property
    def num_instances(self) -> int:
        """Count the instances that may hold blocks."""
        return self.shards[0].num_instances

    def shard_of(self, keys: Sequence[int]) -> int:
        """Return the number of the shard that answers for a chain."""
        if len(keys) < self.depth:
            return 0  # all of its blocks are in all shards
        return ((index(keys[self.depth - 1]) * MIX) % 2**64 >> 32) % len(self.shards)

    def match(self, keys: Sequence[int]) -> np.ndarray:
        """Find the longest prefix that each instance holds; queries one shard."""
        check_keys("match", "keys", keys)
        return self.shards[self.shard_of(keys)].match(keys)

    def holders(self, key: int) -> list[int]:
        """List the instances that hold a block, ascending."""
        return self._holding(key).holders(key)

    def num_holders(self, key: int) -> int:
        """Count the instances that hold a block."""
        return self._holding(key).num_holders(key)

    def add(self, instance: int, keys: Sequence[int]) -> None:
        """Record that an instance holds blocks: a chain from its first block."""
        check_index("add", "instance", instance, self.num_instances)
        check_keys("add", "keys", keys)
        shared = keys[: self.depth - 1]
        chosen = self.shard_of(keys)
        for number, shard in enumerate(self.shards):
            if number == chosen or len(shared):
                shard.add(instance, keys if number == chosen else shared)
        self._shard_of_key.update(dict.fromkeys(keys[self.depth - 1 :], chosen))

    def remove(self, instance: int, keys: Iterable[int]) -> None:
        """Record that an instance no longer holds blocks; unknown ones are ignored."""
        check_index("remove", "instance", instance, self.num_instances)
        keys = listed("remove", keys)
        of_shard: list[list[int]] = [[] for _ in self.shards]
        of_all: list[int] = []
        for key in keys:
            number = self._shard_of_key.get(key)
            (of_all if number is None else of_shard[number]).append(key)
        for shard, own in zip(self.shards, of_shard, strict=True):
            if own or of_all:
                shard.remove(instance, own + of_all)
            for key in own:
                if not shard.num_holders(key):
                    self._shard_of_key.pop(key, None)

    def clear(self, instance: int) -> None:
        """Record that an instance holds nothing, and expect its events from 0 again."""
        check_index("clear", "instance", instance, self.num_instances)
        self._order.forget(instance)
        self._empty(instance)

    def _empty(self, instance: int) -> None:
        for shard in self.shards:
            shard.clear(instance)
        if self.shards[0].is_swept:  # as are all the others, then
            self._shard_of_key = {
                key: number
                for key, number in self._shard_of_key.items()
                if self.shards[number].num_holders(key)
            }

    def _holding(self, key: int) -> PrefixIndex:
        """Return the shard that knows a block; for one that is in all shards, the first."""
        return self.shards[self._shard_of_key.get(key, 0)]

    def apply(self, event: KVEvent) -> bool:
        """Apply an event, and those that waited for it; see :class:`~.interface.Index`."""
        check_instance("apply", "event", event, KVEvent)
        check_index("apply", "instance", event.instance, self.num_instances)
        for ready in self._order.take(event):
            if ready.snapshot:
                self._empty(ready.instance)
            self.remove(ready.instance, ready.removed)
            for chain in ready.stored:
                self.add(ready.instance, chain)
        return not self._order.is_lost(event.instance)
