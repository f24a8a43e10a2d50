"""Memory that the engine may use: registered regions, a staging area for the rest, and offers."""

import contextlib
import queue
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from mooncake_kernels.buffers import Buffer, as_buffer, copy_to_host, shared_memory
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.transfer import Region, TransferEngine, Window


class RegisteredMemory:
    """Regions of an engine, looked up by address. Thread-safe.

    Peers may read only what is shown to them: the rest may be of other objects, or of none.
    """

    def __init__(self, engine: TransferEngine):
        self._engine = engine
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

    def covers(self, address: int, num_bytes: int) -> bool:
        """Whether a range lies in one region."""
        return self._region_of(address, num_bytes) is not None

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

    def close(self) -> None:
        """Deregister everything."""
        with self._lock:
            regions, self._regions = self._regions, []
        for region in regions:
            region.close()

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


class Staging:
    """Registered memory in slots, for data on its way to memory that is not registered.
    Thread-safe.

    Args:
        memory: registers it, on first use.
        num_slots: how many may be in use at once; one more caller waits.
        slot_bytes: size of each.
    """

    def __init__(self, memory: RegisteredMemory, num_slots: int, slot_bytes: int):
        self.slot_bytes = slot_bytes
        self._memory = memory
        self._num_slots = num_slots
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._region: Region | None = None

    @contextlib.contextmanager
    def slot(self) -> Iterator[int]:
        """Borrow a slot; yields its address."""
        self._prepare()
        address = self._slots.get()
        try:
            yield address
        finally:
            self._slots.put(address)

    def _prepare(self) -> None:
        with self._lock:
            if self._region is None:
                area = shared_memory(self._num_slots * self.slot_bytes)
                self._region = self._memory.register(area)
                for i in range(self._num_slots):
                    self._slots.put(self._region.address + i * self.slot_bytes)
