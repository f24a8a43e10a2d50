"""The file of a tier: locked by one process, fully allocated, read and written in whole pages."""

import contextlib
import errno
import fcntl
import os
import warnings
import weakref

import numpy as np

from mooncake_kernels.buffers import shared_memory
from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.transfer import Ticket, TransferEngine

from .layout import PAGE, unpack_superblock
from .own_file import open_own

SCAN_BYTES = 1 << 20


class Disk:
    """A locked file, and an engine that moves pages between it and staging memory.

    Args:
        path: of the file; made if it does not exist.
        bucket_bytes: of the tier; a file with other buckets is refused, and left as it is.
        num_bytes: minimum size of the file; all of it is allocated, so that a file system without
            copy on write has no reason to refuse a later write.
        staging_bytes: size of the memory that pages go through.
        deadline_s: for each read, write and sync.

    Attributes:
        path: of the file.
        tier_id: of the file; None if it is new: all zeros, as of who died while making it.
        staging: ``[staging_bytes]`` uint8, registered.

    Raises:
        InvalidArgument: it is not a regular file, or others own it or may write it; it is not a
            tier, a tier with other buckets, or already larger.
        Unavailable: another tier, of this process or another, has it open; or its version differs.
        OSError: it cannot be made, or there is no space; a file that was made is removed.
    """

    def __init__(
        self, path: str, bucket_bytes: int, num_bytes: int, staging_bytes: int, deadline_s: float
    ):
        self.path = os.path.abspath(path)
        self._deadline_s = deadline_s
        with contextlib.ExitStack() as undo:
            self._fd, made = open_own(self.path)
            undo.callback(os.close, self._fd)
            self._lock()
            if made:
                undo.callback(os.unlink, self.path)
            self.tier_id = self._identify(bucket_bytes)
            self._take_space(num_bytes)
            self.engine = TransferEngine(transports=["file"])
            undo.callback(self.engine.close)
            self.staging = shared_memory(staging_bytes).numpy()
            self._address = self.engine.register(self.staging).address
            self._peer = self.engine.open(
                f"file:{self.path}", allow_file=True, deadline_s=deadline_s, descriptor=self._fd
            )
            # Runs when this object is collected, too. A process that exits needs no help.
            self._release = weakref.finalize(self, _release, self.engine, self._fd)
            self._release.atexit = False
            undo.pop_all()

    @property
    def closed(self) -> bool:
        return not self._release.alive

    def __del__(self) -> None:
        """Warn about a tier that was not closed."""
        if "_release" in vars(self) and not self.closed:
            warnings.warn(f"unclosed SsdTier {self.path!r}", ResourceWarning, stacklevel=2)

    def write(self, offset: int, start: int, num_bytes: int) -> Ticket:
        """Begin to write pages of the staging memory, from ``start`` on."""
        moves = [(self._address + start, offset, num_bytes)]
        return self.engine.write(self._peer, moves, deadline_s=self._deadline_s)

    def read(self, moves: list[tuple[int, int, int]]) -> Ticket:
        """Begin to read pages: (start in the staging memory, offset, bytes) each."""
        rows = [(self._address + start, offset, num_bytes) for start, offset, num_bytes in moves]
        return self.engine.read(self._peer, rows, deadline_s=self._deadline_s)

    def sync(self) -> None:
        """Wait until everything written is durable across a loss of power.

        Raises:
            TransferError: the disk reports that it is not.
        """
        self._peer.sync(deadline_s=self._deadline_s).wait()

    def sync_name(self) -> None:
        """Make the file's size and name durable across a loss of power, too."""
        os.fsync(self._fd)
        folder = os.open(os.path.dirname(self.path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def close(self) -> None:
        """End what is in flight, and unlock the file. Idempotent."""
        self._release()

    def _lock(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Unavailable(f"SsdTier: another tier has {self.path!r} open") from None

    def _identify(self, bucket_bytes: int) -> bytes | None:
        head = os.pread(self._fd, PAGE, 0).ljust(PAGE, b"\0")
        if not any(head):
            if not self._is_blank():
                raise InvalidArgument(
                    f"SsdTier: path must be a tier or a new file, got {self.path!r}, "
                    "which begins with zeros, but has data"
                )
            return None
        tier_id, found = unpack_superblock(np.frombuffer(head, np.uint8), self.path)
        if found != bucket_bytes:
            raise InvalidArgument(
                f"SsdTier: bucket_bytes must be {found}, as {self.path!r} has them, "
                f"got {bucket_bytes}"
            )
        return tier_id

    def _is_blank(self) -> bool:
        """Whether all that was ever written to the file is zeros."""
        place, size = 0, os.fstat(self._fd).st_size
        while place < size:
            try:
                place = os.lseek(self._fd, place, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    raise
                break  # there are only holes
            part = os.pread(self._fd, SCAN_BYTES, place)
            if part.count(0) < len(part):
                return False
            place += SCAN_BYTES
        return True

    def _take_space(self, num_bytes: int) -> None:
        had = os.fstat(self._fd).st_size
        if had > num_bytes:
            raise InvalidArgument(
                f"SsdTier: capacity_bytes must not be less than {self.path!r} has, "
                f"got a file of {num_bytes} bytes for one of {had}"
            )
        try:
            os.posix_fallocate(self._fd, 0, num_bytes)
        except OSError as error:
            os.ftruncate(self._fd, had)
            raise OSError(error.errno, f"SsdTier: {error.strerror}", self.path) from None


def _release(engine: TransferEngine, fd: int) -> None:
    try:
        engine.close()  # first: nothing may be written by one who has not the lock
    finally:
        os.close(fd)
