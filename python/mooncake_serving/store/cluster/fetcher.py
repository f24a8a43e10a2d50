"""Moves bytes of a peer into local memory: directly if that is registered, else by staging.

A holder reports where it has pinned objects; each that its destination takes is a pending read.
"""

import contextlib
import ctypes
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mooncake_kernels.buffers import Buffer
from mooncake_kernels.errors import FailureKind, TransferError
from mooncake_kernels.pool import checksum_of
from mooncake_kernels.transfer import Peer, Ticket, TransferEngine

from ..directory import Member
from . import messages
from .destinations import Destination, Outcome, Range
from .memory import RegisteredMemory, Staging
from .messages import Pinned

OUTCOMES = {
    messages.PINNED: Outcome.DONE,  # unless the read fails
    messages.ABSENT: Outcome.ABSENT,
    messages.DAMAGED: Outcome.DAMAGED,
    messages.BUSY: Outcome.BUSY,
}
Fetch = tuple[int, Range]  # address of an object at the peer, and a part of it
NOT_PINNED = (messages.ABSENT, messages.DAMAGED, messages.BUSY)


@dataclass(frozen=True)
class PendingRead:
    """An object that is being read, or a part of it.

    Attributes:
        destination: which has accepted it.
        address: where it is at its holder.
        ranges: where it goes.
        checksum: as reported by its holder; 0: none.
    """

    destination: Destination
    address: int
    ranges: Sequence[Range]
    checksum: int

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.ranges)

    def fetches(self) -> list[Fetch]:
        return [(self.address, part) for part in self.ranges]

    def check(self, member: Member) -> None:
        at = self.destination.location
        here = [Buffer(part.address, part.num_bytes, at, True, None) for part in self.ranges]
        if checksum_of(*here) != self.checksum:
            what = "checksum: what has arrived is not what was stored"
            raise TransferError(member.name, what, kind=FailureKind.CHECKSUM)


def open_destinations(
    answer: Pinned, destinations: Sequence[Destination], opened: list[PendingRead], member: Member
) -> list[Outcome]:
    """Each object's result; those that their destinations accept are appended to ``opened``."""
    rows = answer.rows().tolist()
    if len(rows) != len(destinations):
        what = f"pin: {len(rows)} answers to {len(destinations)} keys"
        raise TransferError(member.name, what, kind=FailureKind.INCOMPATIBLE)
    results: list[Outcome] = []
    for destination, (status, address, num_bytes, checksum) in zip(destinations, rows, strict=True):
        outcome = OUTCOMES.get(status, Outcome.UNREACHED)
        if outcome is Outcome.DONE:
            if num_bytes > member.capacity_bytes or address + num_bytes >= 1 << 64:
                what = f"pin: an object of {num_bytes} bytes"
                raise TransferError(member.name, what, kind=FailureKind.INCOMPATIBLE)
            ranges = destination.open(num_bytes)
            if ranges is None:
                outcome = Outcome.NOT_TAKEN
            else:
                opened.append(PendingRead(destination, address, ranges, checksum))
        results.append(outcome)
    return results


class Fetcher:
    """Reads objects of peers. Thread-safe.

    Args:
        engine: does the reads.
        memory: what is registered with it.
        staging: for everything else.
    """

    def __init__(self, engine: TransferEngine, memory: RegisteredMemory, staging: Staging):
        self._engine = engine
        self._memory = memory
        self._staging = staging

    def read(
        self, peer: Peer, fetches: Sequence[Fetch], *, checksum: bool, deadline_s: float
    ) -> None:
        """Read parts of objects, and wait until they are there.

        Args:
            peer: whose objects they are.
            fetches: what goes where.
            checksum: whether the peer compares what has arrived with what it has.
            deadline_s: seconds for all of it.

        Raises:
            TransferError: it failed, or was not over in time.
        """
        until = time.monotonic() + deadline_s
        direct: list[Fetch] = []
        staged: list[Fetch] = []
        for fetch in fetches:
            part = fetch[1]
            is_direct = self._memory.covers(part.address, part.num_bytes)
            (direct if is_direct else staged).append(fetch)
        with contextlib.ExitStack() as under_way:
            if direct:
                rows = [(part.address, at + part.offset, part.num_bytes) for at, part in direct]
                ticket = self._engine.read(peer, rows, checksum=checksum, deadline_s=deadline_s)
                under_way.enter_context(_over_at_the_end(ticket))
            for batch in _batches(staged, self._staging.slot_bytes):
                self._read_staged(peer, batch, checksum, until)

    def _read_staged(
        self, peer: Peer, batch: Sequence[Fetch], checksum: bool, until: float
    ) -> None:
        with self._staging.slot() as address:
            rows, copies = [], []
            for remote, part in batch:
                rows.append((address, remote + part.offset, part.num_bytes))
                copies.append((part.address, address, part.num_bytes))
                address += part.num_bytes
            remaining_s = max(0.001, until - time.monotonic())
            ticket = self._engine.read(peer, rows, checksum=checksum, deadline_s=remaining_s)
            with _over_at_the_end(ticket):
                pass
            for copy in copies:
                ctypes.memmove(*copy)


@contextlib.contextmanager
def _over_at_the_end(ticket: Ticket) -> Iterator[None]:
    """Wait for a transfer at the end. If an exception ends the block or the wait, even Ctrl-C, the
    transfer is cancelled: it no longer writes to its destination afterwards.
    """
    try:
        yield
        ticket.wait()
    except BaseException:
        ticket.cancel()
        raise


def _batches(fetches: Sequence[Fetch], limit: int) -> Iterator[list[Fetch]]:
    """Split parts that are larger than ``limit``, and join smaller ones."""
    batch: list[Fetch] = []
    room = limit
    for remote, part in fetches:
        done = 0
        while done < part.num_bytes:
            size = min(room, part.num_bytes - done)
            batch.append((remote, Range(part.address + done, part.offset + done, size)))
            done += size
            room -= size
            if room == 0:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch
