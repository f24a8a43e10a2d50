"""The file of a tier: locked by one process, fully allocated, read and written in whole pages.

``Disk`` is the file, ``Reader`` the concurrent reads of many ranges through staging memory that all
threads share, ``Health`` whether it is writable, as far as is known.
"""

import contextlib
import errno
import fcntl
import os
import queue
import stat
import time
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_kernels.buffers import shared_memory
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.transfer import Ticket, TransferEngine

from .layout import PAGE, pages, unpack_superblock
from .stats import log

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


@dataclass(frozen=True)
class Piece:
    """A part of a range that fits into a slot: what is read at once."""

    index: int  # of its range
    offset: int  # in the file
    start: int  # in the staging memory
    out: np.ndarray


class Reader:
    """Reads ranges that begin at pages. Thread-safe.

    While one slot is being read into, the previous one is copied from.

    Args:
        disk: what is read.
        first: where its part of the staging memory begins.
        num_slots: how many reads are in flight at once, of all threads.
        slot_bytes: size of each, whole pages.
    """

    def __init__(self, disk: Disk, first: int, num_slots: int, slot_bytes: int):
        self._disk = disk
        self._slot_bytes = slot_bytes
        self._free: queue.Queue[int] = queue.Queue()
        for i in range(num_slots):
            self._free.put(first + i * slot_bytes)

    def read(self, offset: int, num_bytes: int) -> np.ndarray | None:
        """Return ``[num_bytes]`` uint8 from a page on; None if the disk cannot read it."""
        out = np.empty(num_bytes, np.uint8)
        return out if not self.read_each([(offset, out)]) else None

    def read_each(self, ranges: Sequence[tuple[int, np.ndarray]]) -> set[int]:
        """Fill byte arrays, each from its offset on, a multiple of a page.

        Returns:
            The indices of ranges that the disk cannot read.

        Raises:
            TransferError: the deadline passed.
        """
        failed: set[int] = set()
        under_way: deque[tuple[int, list[Piece], Ticket]] = deque()
        try:
            for group in self._groups(ranges):
                while (slot := self._take(wait=not under_way)) is None:
                    self._finish(under_way, failed)
                placed = [Piece(p.index, p.offset, slot + p.start, p.out) for p in group]
                try:
                    ticket = self._submit(placed)
                except BaseException:
                    self._free.put(slot)
                    raise
                under_way.append((slot, placed, ticket))
            while under_way:
                self._finish(under_way, failed)
        finally:
            for slot, _, ticket in under_way:  # on an exception: leave the memory alone
                ticket.cancel()
                self._free.put(slot)
        return failed

    def _groups(self, ranges: Sequence[tuple[int, np.ndarray]]) -> Iterator[list[Piece]]:
        """Pieces that fill a slot, with starts relative to it."""
        group: list[Piece] = []
        used = 0
        for index, (offset, out) in enumerate(ranges):
            for begin in range(0, len(out), self._slot_bytes):
                part = out[begin : begin + self._slot_bytes]
                if used + pages(len(part)) > self._slot_bytes:
                    yield group
                    group, used = [], 0
                group.append(Piece(index, offset + begin, used, part))
                used += pages(len(part))
        if group:
            yield group

    def _take(self, wait: bool) -> int | None:
        try:
            return self._free.get(block=wait)
        except queue.Empty:
            return None

    def _submit(self, pieces: list[Piece]) -> Ticket:
        return self._disk.read([(p.start, p.offset, pages(len(p.out))) for p in pieces])

    def _finish(self, under_way: deque[tuple[int, list[Piece], Ticket]], failed: set[int]) -> None:
        """Wait for the oldest read, and copy what it has read."""
        slot, pieces, ticket = under_way[0]
        for piece in self._readable(pieces, ticket, failed):
            staged = self._disk.staging[piece.start : piece.start + len(piece.out)]
            np.copyto(piece.out, staged)
        under_way.popleft()
        self._free.put(slot)

    def _readable(self, pieces: list[Piece], ticket: Ticket, failed: set[int]) -> list[Piece]:
        """Return the pieces that could be read; after an error each is retried alone."""
        try:
            ticket.wait()
        except TransferError as error:
            if error.timed_out:
                raise
            if len(pieces) > 1:
                return [p for p in pieces if self._readable([p], self._submit([p]), failed)]
            failed.add(pieces[0].index)
            return []
        except BaseException:  # including Ctrl-C, after which the read would continue
            ticket.cancel()
            raise
        return pieces


class Health:
    """After an error nothing is written for some time; then writing is retried.

    Args:
        path: of the file, for the log.
        retry_s: for how long, in seconds.

    Attributes:
        error: the last one; empty if a write succeeded since.
        num_errors: how many there were.
    """

    def __init__(self, path: str, retry_s: float):
        self._path = path
        self._retry_s = retry_s
        self._until = 0.0
        self.error = ""
        self.num_errors = 0

    @property
    def is_writable(self) -> bool:
        return not self.error or time.monotonic() >= self._until

    def failed(self, error: TransferError) -> None:
        self.error, self._until = error.cause, time.monotonic() + self._retry_s
        self.num_errors += 1
        log.warning("%s: nothing is written for %g s: %s", self._path, self._retry_s, error.cause)

    def succeeded(self) -> None:
        if self.error:
            log.warning("%s can be written again", self._path)
            self.error = ""


def open_own(path: str) -> tuple[int, bool]:
    """Open a file for reading and writing, or make it; of what is there, nothing is followed.

    Returns:
        The descriptor, which the caller closes; whether the file was made.

    Raises:
        InvalidArgument: it is not a regular file, or belongs to others, or others may write it.
        OSError: it cannot be opened, or made.
    """
    while True:
        with contextlib.suppress(FileNotFoundError):
            return _open_there(path), False
        with contextlib.suppress(FileExistsError):  # another process has made it meanwhile
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), True


def _open_there(path: str) -> int:
    # First as a place: a FIFO or a device is not opened.
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(place)
        mode = stat.S_IMODE(about.st_mode)
        if not stat.S_ISREG(about.st_mode):
            raise InvalidArgument(f"SsdTier: path must be a regular file, got {path!r}")
        if about.st_uid != os.geteuid() or mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InvalidArgument(
                f"SsdTier: path must be a file of user {os.geteuid()} that no one else can write, "
                f"got {path!r} of user {about.st_uid} with mode {mode:04o}"
            )
        return os.open(f"/proc/self/fd/{place}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(place)
