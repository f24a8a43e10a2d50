"""Registered memory: local regions, which a NIC may use, and a peer's, as it describes them."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from .. import _host
from .._arguments import as_instance, as_int32, as_integer, as_one_of
from ..buffers import Buffer, as_buffer
from ..errors import InvalidArgument, shown
from ._handles import Handle

if TYPE_CHECKING:
    from .device import Device

Access = Literal["local", "remote_read", "remote_write", "remote_read_write"]
Mapping = Literal["auto", "dmabuf", "peermem"]

# Bits of csrc/rdma/memory_region.h.
LOCAL_WRITE, REMOTE_READ, REMOTE_WRITE, RELAXED_ORDERING = 1, 2, 4, 8
ACCESS: dict[Access, int] = {
    "local": 0,
    "remote_read": REMOTE_READ,
    "remote_write": REMOTE_WRITE,
    "remote_read_write": REMOTE_READ | REMOTE_WRITE,
}
MAPPINGS = ("auto", "dmabuf", "peermem")
_MAGIC = b"MKr1"
_HEAD = struct.Struct("<4sII")  # magic, access, pieces
_PIECE = struct.Struct("<QQI")  # address, bytes, rkey
_MAX_PIECES = 1 << 20


@dataclass(frozen=True)
class RemoteRegion:
    """Memory of a peer, as the peer describes it: ``region.remote``.

    Attributes:
        access: what it allows, bits as in ``region.py``.
        pieces: (address, bytes, rkey), in order and contiguous.
    """

    access: int
    pieces: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        as_integer("RemoteRegion", "access", self.access, 0, 15)
        as_instance("RemoteRegion", "pieces", self.pieces, tuple, "a tuple of triples")
        for i, piece in enumerate(self.pieces):
            if not isinstance(piece, tuple) or len(piece) != 3:
                raise InvalidArgument(
                    f"RemoteRegion: pieces[{i}] must be (address, bytes, rkey), got {shown(piece)}"
                )
            for value, bits in zip(piece, (64, 64, 32), strict=True):
                as_integer("RemoteRegion", f"pieces[{i}]", value, 0, (1 << bits) - 1)
        _ = self.handle  # refuses pieces that are not contiguous

    @property
    def address(self) -> int:
        """Where it begins, in the peer's address space."""
        return self.pieces[0][0]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return sum(num_bytes for _, num_bytes, _ in self.pieces)

    def to_bytes(self) -> bytes:
        """Serialize it for a peer: 12 bytes, and 20 for each piece."""
        head = _HEAD.pack(_MAGIC, self.access, len(self.pieces))
        return head + b"".join(_PIECE.pack(*piece) for piece in self.pieces)

    @classmethod
    def from_bytes(cls, data: bytes) -> "RemoteRegion":
        """Parse a peer's ``to_bytes()``.

        Raises:
            InvalidArgument: the bytes are not a region.
        """
        as_instance(
            "RemoteRegion.from_bytes", "data", data, (bytes, bytearray, memoryview), "bytes"
        )
        if len(data) < _HEAD.size or data[:4] != _MAGIC:
            raise InvalidArgument(
                f"RemoteRegion.from_bytes: data must begin with {_MAGIC!r}, got {len(data)} bytes "
                f"that begin with {bytes(data[:4])!r}"
            )
        _, access, num_pieces = _HEAD.unpack_from(data)
        size = _HEAD.size + num_pieces * _PIECE.size
        if not 1 <= num_pieces <= _MAX_PIECES or len(data) != size:
            raise InvalidArgument(
                f"RemoteRegion.from_bytes: data must hold the {num_pieces} pieces that it says, "
                f"got {len(data)} bytes"
            )
        return cls(access, tuple(_PIECE.iter_unpack(data[_HEAD.size :])))

    @cached_property
    def handle(self) -> Any:
        """The same, for the compiled code."""
        return _host.RdmaRemoteRegion(self.access, list(self.pieces))


class Region(Handle):
    """Memory that one NIC may use, until it is closed. Made by ``device.register()``.

    Attributes:
        device: the NIC.
        address, num_bytes: the memory.
        location: ``cpu:0`` or ``cuda:<ordinal>``.
        access: what peers may do.
        mapping: how the NIC accesses it: ``"host"``, ``"dmabuf"`` or ``"peermem"``.
        note: for GPU memory, what went wrong: why not by dma-buf, why synchronous copies may
            return too early. Empty if nothing did.
        lkey, rkey: of the region, if it is one piece.
        pieces: (address, bytes, lkey, rkey); several where a device limits a region's size, or GPU
            memory consists of several mappings.
        remote: what a peer needs to read and write it.
    """

    def __init__(self, handle: Any, device: "Device", buffer: Buffer, access: int):
        super().__init__(handle)
        self._buffer: Buffer | None = buffer  # keeps the memory alive
        self._access = access
        self.device = device
        self.address = buffer.address
        self.num_bytes = buffer.num_bytes
        self.location = buffer.location
        self.mapping: str = handle.mapping
        self.note: str = handle.note

    def close(self) -> None:
        """Deregister the memory, and hold it no longer. Idempotent; no effect in a forked child."""
        super().close()
        self._buffer = None

    @property
    def access(self) -> Access:
        """What peers may do."""
        remote = self._access & (REMOTE_READ | REMOTE_WRITE)
        return next(name for name, bits in ACCESS.items() if bits == remote)

    @property
    def pieces(self) -> list[tuple[int, int, int, int]]:
        """Its parts: (address, bytes, lkey, rkey)."""
        return self._handle.pieces()

    @property
    def lkey(self) -> int:
        """The key by which this process's queue pairs use it."""
        return self._only_piece("lkey")[2]

    @property
    def rkey(self) -> int:
        """The key by which peers use it."""
        return self._only_piece("rkey")[3]

    def _only_piece(self, name: str) -> tuple[int, int, int, int]:
        pieces = self.pieces
        if len(pieces) > 1:
            raise InvalidArgument(f"{name}: region must be of one piece, got {len(pieces)}")
        return pieces[0]

    @property
    def remote(self) -> RemoteRegion:
        """What a peer needs to read and write it."""
        pieces = tuple((address, size, rkey) for address, size, _, rkey in self.pieces)
        return RemoteRegion(self._access & (REMOTE_READ | REMOTE_WRITE), pieces)


def register(
    devices: "Sequence[Device]",
    buffer: Any,
    access: Access = "local",
    *,
    mapping: Mapping = "auto",
    relaxed_ordering: bool = True,
    max_piece_bytes: int = 0,
) -> list[Region]:
    """Register memory on several NICs, on all or none; from 1 MiB on, on all of them at once.

    GPU memory is exported as one dma-buf that all of them share: each export may take a window of
    the GPU's BAR1.

    Args:
        devices: open NICs, each once.
        buffer: torch tensor, cupy or numpy array, or an object with the buffer protocol; packed.
        access: what peers may do: ``"local"`` (nothing), ``"remote_read"``, ``"remote_write"`` or
            ``"remote_read_write"``. This process may always write to writable memory.
        mapping: for GPU memory: only ``"dmabuf"`` or ``"peermem"`` (the nvidia_peermem module), or
            ``"auto"``: the first that works, in that order.
        relaxed_ordering: let PCIe reorder writes within a transfer, which some machines need to
            reach their bandwidth. Not for memory that is polled until its last byte changes.
        max_piece_bytes: split into pieces no larger than this, in whole pages; 0: the device's
            limit.

    Returns:
        A region per device, in their order. They keep the buffer alive until they are closed.

    Raises:
        InvalidArgument: an empty or read-only buffer, another access, memory of several kinds, host
            memory with a mapping of GPU memory.
        Unavailable: GPU memory that can be mapped in neither way; the message has both reasons.
        OSError: the kernel's error, and its meaning here: not mapped, mapped read-only, the limit
            of locked memory.
    """
    memory = as_buffer(buffer)
    flags = access_flags(memory, access, relaxed_ordering)
    mapping_index = MAPPINGS.index(as_one_of("register", "mapping", mapping, MAPPINGS))
    most = as_integer("register", "max_piece_bytes", max_piece_bytes, 0, (1 << 63) - 1)
    devices = list(devices) if isinstance(devices, Iterable) else [devices]
    handles = device_handles("register", devices)
    made = _host.rdma_register(
        handles, memory.address, memory.num_bytes, flags, mapping_index, most
    )
    regions = [
        Region(handle, device, memory, flags) for handle, device in zip(made, devices, strict=True)
    ]
    for device, region in zip(devices, regions, strict=True):
        device._made[id(region)] = region
    return regions


def device_handles(op: str, devices: "Sequence[Device]") -> list[Any]:
    """The compiled code's handles of the devices, each of which must be named once."""
    for i, device in enumerate(devices):
        if not isinstance(getattr(device, "_handle", None), _host.RdmaDevice):
            raise InvalidArgument(f"{op}: devices[{i}] must be an open Device, got {shown(device)}")
    handles = [device._handle for device in devices]
    if len(set(map(id, handles))) != len(handles):
        names = [device.name for device in devices]
        raise InvalidArgument(f"{op}: devices must each be named once, got {names}")
    return handles


def access_flags(memory: Buffer, access: Access, relaxed_ordering: bool) -> int:
    """The access bits for that memory."""
    as_one_of("register", "access", access, tuple(ACCESS))
    as_instance("register", "relaxed_ordering", relaxed_ordering, bool, "True or False")
    flags = ACCESS[access]
    if flags & REMOTE_WRITE and not memory.writable:
        raise InvalidArgument(f"register: buffer must be writable for {access!r}, got read-only")
    flags |= LOCAL_WRITE if memory.writable else 0
    return flags | (RELAXED_ORDERING if relaxed_ordering else 0)


def flush_writes(device: int) -> bool:
    """Make what NICs have written to a GPU visible to the kernels launched from now on.

    Call it when a peer has announced the end of its writes, before you launch what reads them.
    Kernels that are already running may see old data in any case. On GPUs that order the writes of
    NICs by themselves there is nothing to do.

    Args:
        device: CUDA's ordinal of the GPU.

    Returns:
        Whether there was something to do.

    Raises:
        Unavailable: no CUDA driver, or one that does not support this; then a peer's writes are
            visible once some of them were read back over RDMA.
        CudaError: the driver failed, or this process has not initialized CUDA.
    """
    return _host.rdma_flush_writes(as_int32("flush_writes", "device", device))
