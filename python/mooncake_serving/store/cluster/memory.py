"""Memory that the engine may use: registered regions, bounce buffers for the rest, and offers."""

import contextlib
import ctypes
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from mooncake_kernels.buffers import Buffer, as_buffer, copy_to_host, shared_memory
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.transfer import Peer, Region, Ticket, TransferEngine, Window

Row = tuple[int, int, int]  # local address, address at the peer, bytes


class RegisteredMemory:
    """Regions of an engine, looked up by address. Thread-safe.

    Peers may read only what is shown to them: the rest may be of other objects, or of none. What is
    read from peers goes to registered memory directly, and to other memory by way of slots, which
    are registered on first use.

    Args:
        engine: of the regions.
        num_slots: how many may be in use at once; one more caller waits.
        slot_bytes: size of each.
    """

    def __init__(self, engine: TransferEngine, num_slots: int, slot_bytes: int):
        self._engine = engine
        self._num_slots = num_slots
        self._slot_bytes = slot_bytes
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()  # their addresses
        self._has_slots = False
        self._regions: list[Region] = []
        self._num_lent: Counter[Region] = Counter()  # regions that end with their last user
        self._lock = threading.RLock()

    def register(self, buffer: Any) -> Region:
        """Register memory, see ``TransferEngine.register``."""
        with self._lock:
            region = self._engine.register(buffer, "windows")
            self._regions.append(region)
            return region

    def deregister(self, region: Region) -> None:
        with self._lock:
            if region in self._regions:
                self._regions.remove(region)
        region.close()

    def show(self, address: int, num_bytes: int) -> Window:
        """Let peers read a range of a region, until the window is closed.

        Raises:
            InvalidArgument: it lies in no region.
        """
        region = self._region_of(address, num_bytes)
        if region is None:
            raise InvalidArgument(f"show: range must be registered, got {address:#x} + {num_bytes}")
        return region.window(address, num_bytes)

    @contextlib.contextmanager
    def lend(self, buffer: Buffer) -> Iterator[Buffer]:
        """Let peers read host memory for the duration of the ``with`` block. Yields what they read:
        a copy, if the engine has registered a part of it otherwise.
        """
        memory = buffer
        if memory.num_bytes == 0:
            yield memory
            return
        with self._lock:
            region = self._region_of(memory.address, memory.num_bytes)
            is_lent = region is None or region in self._num_lent
            if region is None:
                try:
                    region = self.register(memory)
                except InvalidArgument:  # it would overlap another region
                    memory = as_buffer(copy_to_host([buffer]))
                    region = self.register(memory)
            if is_lent:
                self._num_lent[region] += 1
        try:
            with region.window(memory.address, memory.num_bytes):
                yield memory
        finally:
            if is_lent:
                self._take_back(region)

    def read(self, peer: Peer, rows: Sequence[Row], *, checksum: bool, deadline_s: float) -> None:
        """Read ranges of a peer's memory, and wait until they are there.

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
            (staged if self._region_of(address, num_bytes) is None else direct).append(row)
        with contextlib.ExitStack() as under_way:
            if direct:
                ticket = self._engine.read(peer, direct, checksum=checksum, deadline_s=deadline_s)
                under_way.enter_context(_over_at_the_end(ticket))
            for batch in _batches(staged, self._slot_bytes):
                self._read_staged(peer, batch, checksum, until)

    def close(self) -> None:
        """Deregister everything."""
        with self._lock:
            regions, self._regions = self._regions, []
        for region in regions:
            region.close()

    def _read_staged(self, peer: Peer, batch: Sequence[Row], checksum: bool, until: float) -> None:
        with self._slot() as address:
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
    def _slot(self) -> Iterator[int]:
        """Borrow a slot; yields its address."""
        with self._lock:
            if not self._has_slots:
                first = self.register(shared_memory(self._num_slots * self._slot_bytes)).address
                for i in range(self._num_slots):
                    self._slots.put(first + i * self._slot_bytes)
                self._has_slots = True
        address = self._slots.get()
        try:
            yield address
        finally:
            self._slots.put(address)

    def _take_back(self, region: Region) -> None:
        with self._lock:
            self._num_lent[region] -= 1
            is_last = self._num_lent[region] == 0
            if is_last:
                del self._num_lent[region]
                self._regions = [other for other in self._regions if other is not region]
        if is_last:
            region.close()

    def _region_of(self, address: int, num_bytes: int) -> Region | None:
        end = address + num_bytes
        with self._lock:
            for region in self._regions:
                if region.address <= address and end <= region.address + region.num_bytes:
                    return region
        return None


class Offers:
    """Memory that others have been asked to read. Thread-safe.

    At the end they ask whether the offer was valid until then: what was read from an offer given up
    meanwhile does not become an object, however late it was read.
    """

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()

    def add(self, number: int, name: str) -> None:
        with self._lock:
            self._names[number] = name

    def end(self, number: int, name: str) -> bool:
        """End an offer; returns whether it was still valid."""
        with self._lock:
            if self._names.get(number) != name:
                return False
            del self._names[number]
            return True


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
