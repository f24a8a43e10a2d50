"""The memory of this process, and what an engine has registered of it, by address."""

import ctypes
import mmap
import sys
import threading
from collections.abc import Iterable

from mooncake_kernels.buffers import Buffer, copy_from_host, copy_to_host, gpu_memory_at
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.transfer import Region, TransferEngine

from ..mapped_memory import MappedMemory
from .codes import (
    ERR_ADDRESS_NOT_REGISTERED,
    ERR_ADDRESS_OVERLAPPED,
    ERR_INVALID_ARGUMENT,
    ERR_NOT_IMPLEMENTED,
    Failed,
)

Range = tuple[int, int]  # address, bytes


class Memory:
    """Registers raw addresses with an engine, and memory of its own. Thread-safe."""

    def __init__(self, engine: TransferEngine):
        self._engine = engine
        self._lock = threading.Lock()
        self._regions: dict[int, Region] = {}
        self._managed: dict[int, mmap.mmap] = {}  # the memory of those allocated here

    def register(self, ranges: Iterable[Range], location: str, *, argument: str) -> None:
        """Register all of the ranges, or none. Errors call the addresses ``argument``."""
        if not isinstance(location, str) or not (
            location == "*" or location.startswith(("cpu:", "cuda:"))
        ):
            raise Failed(
                ERR_NOT_IMPLEMENTED,
                f'location must be "*", "cpu:<node>" or "cuda:<GPU>", got {location!r:.80}',
            )
        mapped = MappedMemory()
        regions: list[Region] = []
        try:
            for address, num_bytes in ranges:
                regions.append(self._register(address, num_bytes, location, mapped, argument))
        except BaseException as error:  # including errors of a NIC or a driver
            overlaps = self._overlaps(address, num_bytes, regions)
            for region in regions:
                region.close()
            if not isinstance(error, InvalidArgument):
                raise
            code = ERR_ADDRESS_OVERLAPPED if overlaps else ERR_INVALID_ARGUMENT
            raise Failed(code, str(error)) from None
        with self._lock:
            self._regions.update({region.address: region for region in regions})

    def unregister(self, addresses: list[int], *, argument: str) -> None:
        """Unregister all of these, or none. Afterwards no thread of the engine touches them."""
        with self._lock:
            unknown = [
                address
                for address in addresses
                if address not in self._regions or address in self._managed
            ]
            if unknown or len(set(addresses)) < len(addresses):
                raise Failed(
                    ERR_ADDRESS_NOT_REGISTERED,
                    f"{argument} must be where registered memory begins, and named once, "
                    f"got {[hex(address) for address in unknown or addresses][:8]}",
                )
            regions = [self._regions.pop(address) for address in addresses]
        for region in regions:
            region.close()

    def allocate(self, num_bytes: int) -> int:
        """Return the address of new registered memory: whole pages, zeros."""
        if num_bytes > sys.maxsize:
            raise InvalidArgument(f"length must be at most {sys.maxsize}, got {num_bytes}")
        pages = mmap.mmap(-1, num_bytes)
        region = self._engine.register(pages)
        with self._lock:
            self._regions[region.address] = region
            self._managed[region.address] = pages
        return region.address

    def free(self, address: int, num_bytes: int) -> None:
        """Free what ``allocate`` returned."""
        with self._lock:
            if address not in self._managed or len(self._managed[address]) != num_bytes:
                raise Failed(
                    ERR_ADDRESS_NOT_REGISTERED,
                    "buffer_addr and length must be those of allocate_managed_buffer, "
                    f"got {_shown(address, num_bytes)}",
                )
            region = self._regions.pop(address)
            pages = self._managed.pop(address)
        region.close()  # until then the engine may be using the pages
        del pages

    def read(self, address: int, num_bytes: int) -> bytes:
        """A copy of a range of registered memory."""
        buffer = self._buffer(address, num_bytes, writes=False)
        return bytes(_view(buffer)) if buffer.is_host else copy_to_host([buffer]).tobytes()

    def write(self, address: int, data: memoryview) -> None:
        """Copy bytes into registered memory."""
        buffer = self._buffer(address, len(data), writes=True)
        if buffer.is_host:
            _view(buffer)[:] = data
        else:
            copy_from_host(data, [buffer])

    def _buffer(self, address: int, num_bytes: int, *, writes: bool) -> Buffer:
        with self._lock:
            for region in self._regions.values():
                is_inside = region.address <= address and (
                    address + num_bytes <= region.address + region.num_bytes
                )
                if is_inside and not (writes and region.access == "read"):
                    return Buffer(address, num_bytes, region.location, writes, owner=None)
        raise InvalidArgument(
            f"the address must be inside {'writable ' if writes else ''}registered memory, "
            f"got {_shown(address, num_bytes)}"
        )

    def _register(
        self, address: int, num_bytes: int, location: str, mapped: MappedMemory, argument: str
    ) -> Region:
        buffer: Buffer | None
        if allowed := mapped.access(address, num_bytes):
            buffer = Buffer(address, num_bytes, "cpu:0", allowed == "rw", owner=None)
        else:
            buffer = gpu_memory_at(address, num_bytes)
        if buffer is None:
            raise InvalidArgument(
                f"{argument} must be memory that this process can read, or of one allocation on a "
                f"GPU, got {_shown(address, num_bytes)}"
            )
        is_there = location.startswith("cpu:") if buffer.is_host else location == buffer.location
        if location != "*" and not is_there:
            raise InvalidArgument(
                f"location must be where the memory is, {buffer.location}, got {location!r:.80}"
            )
        return self._engine.register(buffer, "read_write" if buffer.writable else "read")

    def _overlaps(self, address: int, num_bytes: int, others: list[Region]) -> bool:
        with self._lock:
            regions = [*self._regions.values(), *others]
        return any(
            region.address < address + num_bytes and address < region.address + region.num_bytes
            for region in regions
        )


def _view(buffer: Buffer) -> memoryview:
    return memoryview((ctypes.c_ubyte * buffer.num_bytes).from_address(buffer.address)).cast("B")


def _shown(address: int, num_bytes: int) -> str:
    return f"0x{address:x} + {num_bytes} bytes"
