"""The interface of an index."""

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
        """Record that an instance holds blocks: a chain from its first block. Idempotent."""
        ...

    def remove(self, instance: int, keys: Iterable[int]) -> None:
        """Record that an instance no longer holds some blocks; unknown ones are ignored."""
        ...

    def clear(self, instance: int) -> None:
        """Record that an instance holds nothing: it has failed, or was emptied.

        Its events are expected from 0 again, as if none had arrived yet. If it continues where it
        was, ``apply`` asks for a snapshot.
        """
        ...

    def apply(self, event: KVEvent) -> bool:
        """Apply one event of an instance; see :class:`~.events.KVEvent` for their order.

        Returns:
            Whether everything the instance has reported is known, or at most delayed. False if
            events are missing that will not arrive by themselves: too many later ones are waiting,
            or the first one to arrive is not number 0, since the instance was running before. Later
            events are held back until the missing ones have been sent again and applied, or a
            snapshot has; the caller requests it, once.
        """
        ...
