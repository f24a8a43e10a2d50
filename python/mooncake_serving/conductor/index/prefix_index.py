"""The index in one dict: from a block's key to the set of its holders, as the bits of an int."""

from collections.abc import Iterable, Sequence

import numpy as np

from ..errors import check_count, check_index, check_instance, check_keys, listed
from .event_order import EventOrder
from .events import KVEvent

MAX_SHARED_SETS = 1 << 14
SPARE_BITS = 8  # instances per additional bit


class PrefixIndex:
    """Which of ``num_instances`` hold which block; see :class:`~.interface.Index`.

    A set of holders is an int with a bit for each instance, so that the instances that hold all
    blocks so far take one ``&`` per block. Blocks of one prefix mostly have the same holders: equal
    sets share one object, and a key costs little more than its dict entry.

    An instance that is emptied gets a new bit, and its old one is ignored: sets lose it when they
    are written. There are an eighth more bits than instances; when they are used up, one pass over
    all keys clears the old bits in all sets. So the cost of a restart is small, and keys without
    any holder left are an eighth of all if instances hold equally many.
    """

    def __init__(self, num_instances: int, *, max_waiting_events: int = 1024) -> None:
        check_count("PrefixIndex", "num_instances", num_instances, 1)
        self._num_instances = num_instances
        self._holders: dict[int, int] = {}
        self._shared: dict[int, int] = {}
        self._bit_of = np.arange(num_instances)
        self._num_bits = num_instances + max(1, num_instances // SPARE_BITS)
        self._spare = list(range(num_instances, self._num_bits))
        self._live = (1 << num_instances) - 1  # the bits that count
        self._order = EventOrder(max_waiting_events)

    def __len__(self) -> int:
        """Count the keys that have a holder. It looks at every key."""
        return sum(1 for held in self._holders.values() if held & self._live)

    @property
    def num_instances(self) -> int:
        """Count the instances that may hold blocks."""
        return self._num_instances

    @property
    def is_swept(self) -> bool:
        """Whether no old bits of emptied instances are left."""
        return len(self._spare) == self._num_bits - self._num_instances

    def holders(self, key: int) -> list[int]:
        """List the instances that hold a block, ascending."""
        return np.flatnonzero(self.match([key])).tolist()

    def num_holders(self, key: int) -> int:
        """Count the instances that hold a block."""
        return (self._holders.get(key, 0) & self._live).bit_count()

    def match(self, keys: Sequence[int]) -> np.ndarray:
        """Find the longest prefix that each instance holds; see :class:`~.interface.Index`."""
        check_keys("match", "keys", keys)
        sets, run_lengths = self._prefix_sets(keys)
        if not sets:
            return np.zeros(self._num_instances, np.int64)
        num_bytes = (self._num_bits + 7) // 8
        packed = b"".join(held.to_bytes(num_bytes, "little") for held in sets)
        rows = np.frombuffer(packed, np.uint8).reshape(len(sets), num_bytes)
        bits = np.unpackbits(rows, axis=1, count=self._num_bits, bitorder="little")
        # Each set is a subset of the one before: the number of sets with a bit gives its last one.
        num_sets = np.zeros(self._num_bits, np.int64)
        for start in range(0, len(sets), 255):  # chunks that uint8 can count, which is 20x faster
            num_sets += np.add.reduce(bits[start : start + 255], axis=0, dtype=np.uint8)
        return np.concatenate(([0], np.cumsum(run_lengths)))[num_sets[self._bit_of]]

    def _prefix_sets(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """List the holders of all blocks up to block i, and for how many i in a row that is so."""
        sets: list[int] = []
        run_lengths: list[int] = []
        alive, last, get = self._live, None, self._holders.get
        for key in keys:
            held = get(key, 0)
            if held is not last:
                last, still = held, alive & held
                if not still:
                    break
                if still != alive or not sets:
                    sets.append(still)
                    run_lengths.append(0)
                    alive = still
            run_lengths[-1] += 1
        return sets, run_lengths

    def add(self, instance: int, keys: Sequence[int]) -> None:
        """Record that an instance holds blocks: a chain from its first block."""
        check_keys("add", "keys", keys)
        bit, holders, live = self._bit("add", instance), self._holders, self._live
        before: int | None = None
        after = bit
        for key in keys:
            held = holders.get(key, 0)
            if held is not before:  # its neighbours in the chain mostly have the same set
                before, after = held, self._share((held & live) | bit) if held else bit
            holders[key] = after

    def remove(self, instance: int, keys: Iterable[int]) -> None:
        """Record that an instance no longer holds blocks; unknown ones are ignored."""
        keys = listed("remove", keys)
        bit, holders, live = self._bit("remove", instance), self._holders, self._live
        for key in keys:
            held = holders.get(key)
            if held is None:
                continue
            if held == bit:
                del holders[key]
            elif held & bit:
                left = (held & live) ^ bit
                if left:
                    holders[key] = self._share(left)
                else:
                    del holders[key]

    def clear(self, instance: int) -> None:
        """Record that an instance holds nothing, and expect its events from 0 again."""
        self._bit("clear", instance)
        self._order.forget(instance)
        self._empty(instance)

    def _empty(self, instance: int) -> None:
        """Give an instance a bit that no set has; if it is the last one, free the old ones."""
        old = self._bit("clear", instance)
        self._bit_of[instance] = self._spare.pop()
        self._live ^= old | self._bit("clear", instance)
        if not self._spare:
            self._sweep()

    def _sweep(self) -> None:
        """Clear the bits that do not count in all sets. It looks at every key."""
        live, holders = self._live, self._holders
        changes: list[tuple[int, int]] = []
        before: int | None = None
        after = 0
        for key, held in holders.items():
            if held is not before:  # its neighbours in the chain mostly have the same set
                before, after = held, held & live
                after = held if after == held else self._share(after)
            if after is not held:
                changes.append((key, after))
        for key, after in changes:
            if after:
                holders[key] = after
            else:
                del holders[key]
        self._spare = np.setdiff1d(np.arange(self._num_bits), self._bit_of).tolist()

    def apply(self, event: KVEvent) -> bool:
        """Apply an event, and those that waited for it; see :class:`~.interface.Index`."""
        check_instance("apply", "event", event, KVEvent)
        self._bit("apply", event.instance)
        for ready in self._order.take(event):
            if ready.snapshot:
                self._empty(ready.instance)
            self.remove(ready.instance, ready.removed)
            for chain in ready.stored:
                self.add(ready.instance, chain)
        return not self._order.is_lost(event.instance)

    def _share(self, held: int) -> int:
        """Return an equal set that is already shared, if there is one."""
        if len(self._shared) >= MAX_SHARED_SETS:
            self._shared.clear()  # the sets live on in _holders; only new ones are not shared
        return self._shared.setdefault(held, held)

    def _bit(self, op: str, instance: int) -> int:
        check_index(op, "instance", instance, self._num_instances)
        return 1 << int(self._bit_of[instance])
