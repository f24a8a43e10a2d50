"""What came to a tier and went."""

import numpy as np

from mooncake_kernels.closing import Closing
from mooncake_kernels.pool import PoolChanges

from .index import Index


class TierWatch(Closing):
    """What ``SsdTier.watch`` returns. Thread-safe. A context manager."""

    def __init__(self, index: Index):
        self._index = index
        self._changed = index.watch()

    def look(self) -> PoolChanges:
        """Return what came and went since the last look; the first time, everything that is there.

        An object that came and went in between is not reported, nor one that went and came.
        """
        removed, stored = self._index.take_changes(self._changed)
        return PoolChanges(
            np.array(removed, np.uint64).reshape(-1, 2), np.array(stored, np.uint64).reshape(-1, 2)
        )

    def close(self) -> None:
        """Stop collecting changes. Idempotent."""
        self._index.unwatch(self._changed)
