"""What the conductor asks of an index."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from .events import KVEvent


class Index(Protocol):
    """Knows which instances hold which block; an instance is a number in ``[0, num_instances)``."""

    @property
    def num_instances(self) -> int:
        """Count the instances that may hold blocks."""
        ...

    def match(self, keys: Sequence[int]) -> np.ndarray:
        """Find the longest prefix that each instance holds.

        Equivalent to::

            for instance in range(num_instances):
                while out[instance] < len(keys) and instance in holders(keys[out[instance]]):
                    out[instance] += 1

        Args:
            keys: a request's chain, from its first block.

        Returns:
            ``[num_instances]`` int64, in blocks.
        """
        ...

    def holders(self, key: int) -> list[int]:
        """List the instances that hold a block, ascending."""
        ...

    def num_holders(self, key: int) -> int:
        """Count the instances that hold a block."""
        ...

    def add(self, instance: int, keys: Sequence[int]) -> None:
        """Note that an instance holds blocks: a chain from its first block. Twice does no harm."""
        ...

    def remove(self, instance: int, keys: Iterable[int]) -> None:
        """Note that an instance no longer holds some blocks; unknown ones are passed over."""
        ...

    def clear(self, instance: int) -> None:
        """Note that an instance holds nothing: it has failed, or was emptied.

        Its events are expected from 0 again, as if none had come yet. If it goes on where it was,
        ``apply`` asks for a snapshot.
        """
        ...

    def apply(self, event: KVEvent) -> bool:
        """Follow one event of an instance; see :class:`~.events.KVEvent` for their order.

        Returns:
            Whether all that the instance has told is known, or on its way at most. False if events
            are missing that will not come by themselves: too many after them wait already, or the
            first one that has come is not number 0, for the instance was running before. Those
            after them are held back until the missing ones have been applied, sent again, or a
            snapshot has; which the caller asks for, once.
        """
        ...
