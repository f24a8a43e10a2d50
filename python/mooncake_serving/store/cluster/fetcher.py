"""Moves bytes of a peer into local memory: directly if that is registered, else by staging."""

import contextlib
import ctypes
import time
from collections.abc import Iterator, Sequence

from mooncake_kernels.transfer import Peer, Ticket, TransferEngine

from .memory import RegisteredMemory, Staging

Row = tuple[int, int, int]  # local address, address at the peer, bytes


class Fetcher:
    """Reads memory of peers. Thread-safe.

    Args:
        engine: does the reads.
        memory: what is registered with it.
        staging: for everything else.
    """

    def __init__(self, engine: TransferEngine, memory: RegisteredMemory, staging: Staging):
        self._engine = engine
        self._memory = memory
        self._staging = staging

    def read(self, peer: Peer, rows: Sequence[Row], *, checksum: bool, deadline_s: float) -> None:
        """Read ranges, and wait until they are there.

        Args:
            peer: whose memory it is.
            rows: what goes where.
            checksum: whether the peer compares what has arrived with what it has.
            deadline_s: seconds for all of it.

        Raises:
            TransferError: it failed, or was not over in time.
        """
        until = time.monotonic() + deadline_s
        direct: list[Row] = []
        staged: list[Row] = []
        for row in rows:
            address, _, num_bytes = row
            (direct if self._memory.covers(address, num_bytes) else staged).append(row)
        with contextlib.ExitStack() as under_way:
            if direct:
                ticket = self._engine.read(peer, direct, checksum=checksum, deadline_s=deadline_s)
                under_way.enter_context(_over_at_the_end(ticket))
            for batch in _batches(staged, self._staging.slot_bytes):
                self._read_staged(peer, batch, checksum, until)

    def _read_staged(self, peer: Peer, batch: Sequence[Row], checksum: bool, until: float) -> None:
        with self._staging.slot() as address:
            rows, copies = [], []
            for local, remote, num_bytes in batch:
                rows.append((address, remote, num_bytes))
                copies.append((local, address, num_bytes))
                address += num_bytes
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


def _batches(rows: Sequence[Row], limit: int) -> Iterator[list[Row]]:
    """Split ranges that are larger than ``limit``, and join smaller ones."""
    batch: list[Row] = []
    room = limit
    for local, remote, num_bytes in rows:
        done = 0
        while done < num_bytes:
            size = min(room, num_bytes - done)
            batch.append((local + done, remote + done, size))
            done += size
            room -= size
            if room == 0:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch
