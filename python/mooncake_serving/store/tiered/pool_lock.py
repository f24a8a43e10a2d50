"""The lock of the one tiered store of a pool."""

import fcntl
import os
import struct
import weakref
from collections.abc import Callable

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.pool import ObjectPool

_FLOCK = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0)  # of the first byte


class PoolLock:
    """Held by one store at a time: what another one removes, this one's disk would still have.

    It ends when it is closed or collected; with the process, or with its last surviving forked
    child. It is not one of ``flock``: those of the pool's file are of its watermarks. A pool
    without a file has none.

    Raises:
        Unavailable: another store has it.
    """

    def __init__(self, pool: ObjectPool):
        self._release: Callable[[], object] = lambda: None
        if pool.path.startswith("/proc/"):
            return
        file = pool.reopen()
        try:
            fcntl.fcntl(file, fcntl.F_OFD_SETLK, _FLOCK)
        except (BlockingIOError, PermissionError):
            os.close(file)
            raise Unavailable(
                f"TieredStore: another one has a disk behind the pool {pool.path!r}"
            ) from None
        self._release = weakref.finalize(self, os.close, file)

    def close(self) -> None:
        """Release it. Idempotent."""
        self._release()
