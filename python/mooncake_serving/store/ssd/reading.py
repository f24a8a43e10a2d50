"""Concurrent reads of many ranges, through staging memory that threads share."""

import queue
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import Ticket

from .disk import Disk
from .layout import pages


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
