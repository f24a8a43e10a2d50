"""What came to a pool and went, whichever process did it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .. import _host
from ..errors import InvalidArgument, shown
from .values import closed_pool

if TYPE_CHECKING:
    from .object_pool import ObjectPool


@dataclass(frozen=True)
class PoolChanges:
    """What differs between two looks at a pool. A key in both was removed, and then stored again.

    Attributes:
        removed: ``[n, 2]`` uint64 keys.
        stored: ``[n, 2]`` uint64 keys.
    """

    removed: np.ndarray
    stored: np.ndarray


class PoolWatch:
    """What ``ObjectPool.watch`` returns. Thread-safe."""

    def __init__(self, pool: "ObjectPool"):
        if pool.closed:
            raise closed_pool(pool.path)
        self._pool = pool
        self._native = _host.PoolWatch(pool.native)

    def look(self) -> PoolChanges:
        """Return what came and went since the last look; the first time, everything that is there.

        An object that came and went in between is not reported. It takes no lock if there was no
        change, and else time for each change; after more than 65,536, for each object that the pool
        has room for.

        Raises:
            InvalidArgument: the pool was closed.
            TimeoutError: a stopped process holds the pool; the next look reports everything.
        """
        if self._pool.closed:
            raise InvalidArgument(
                f"look: pool must be open, got the closed {shown(self._pool.path)}"
            )
        return PoolChanges(*self._native.look())
