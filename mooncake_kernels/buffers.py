"""Memory of any library as (address, bytes, location): the form the host code takes.

torch tensors, cupy and numpy arrays, memoryviews and any object with Python's buffer protocol are
accepted without a copy. The memory must be packed: one range of bytes.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch

from . import _host
from ._arguments import as_integer
from .errors import ChecksumError, InvalidArgument

Result = TypeVar("Result")

HOST = "cpu:0"  # what all host memory is called
HOST_TYPES = frozenset({memoryview, bytes, bytearray, np.ndarray})  # but not their subclasses


@dataclass(slots=True, eq=False)  # not frozen: four times as fast to make
class Buffer:
    """A range of memory and what keeps it alive.

    Attributes:
        address: where it starts, in the address space of this process.
        num_bytes: its size.
        location: ``cpu:0`` or ``cuda:<ordinal>``. The NUMA node of host memory is not looked up:
            all of it is called ``cpu:0``.
        writable: whether others may be allowed to write to it.
        owner: the object it belongs to; keep a reference while the address is in use.
    """

    address: int
    num_bytes: int
    location: str
    writable: bool
    owner: Any

    @property
    def is_host(self) -> bool:
        """Whether it is host memory."""
        return self.location.startswith("cpu")


def as_buffer(memory: Any, *, argument: str = "buffer") -> Buffer:
    """Describe an object's memory without copying it.

    Args:
        memory: torch tensor, cupy or numpy array, or an object with the buffer protocol; packed.
        argument: its name in error messages.

    Returns:
        A ``Buffer`` that keeps the memory alive, of a tensor its storage.

    Raises:
        InvalidArgument: the object has no memory of its own, is not packed, or its bytes are not
            its values: Python objects, sparse tensors, lazy conjugates and negatives.
    """
    if type(memory) not in HOST_TYPES:
        if isinstance(memory, Buffer):
            return memory
        if isinstance(memory, torch.Tensor):
            return _from_tensor(memory, argument)
        if hasattr(memory, "__cuda_array_interface__"):
            return _from_cuda_array(memory, argument)
    try:
        view = memoryview(memory)
    except (TypeError, ValueError) as error:  # numpy's ValueError: dates have no buffer
        raise InvalidArgument(
            f"{argument} must be a torch tensor, a cupy or numpy array or an object with the "
            f"buffer protocol, got {type(memory).__name__} ({error})"
        ) from None
    if "O" in view.format:
        raise InvalidArgument(f"{argument} must hold no Python objects, got format {view.format!r}")
    if not view.c_contiguous:
        raise InvalidArgument(f"{argument} must be packed, got strides {view.strides}")
    array = np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
    # The owner is the array, which holds the export: so a bytearray cannot be resized meanwhile.
    return Buffer(_host.address_of_bytes(array), view.nbytes, HOST, not view.readonly, array)


def as_writable(op: str, buffers: Iterable[Any]) -> list[Buffer]:
    """Describe memory that something is copied to; ``op`` is the call, whose ``buffers`` they are.

    Raises:
        InvalidArgument: one is not memory, see ``as_buffer``, or is read-only.
    """
    described = []
    for i, buffer in enumerate(buffers):
        memory = buffer
        if type(memory) is not Buffer:  # it is when others have called this before
            memory = as_buffer(buffer, argument=f"{op}: buffers[{i}]")
        if not memory.writable:
            raise InvalidArgument(f"{op}: buffers[{i}] must be writable, got read-only memory")
        described.append(memory)
    return described


def gpu_memory_at(address: int, num_bytes: int) -> Buffer | None:
    """Describe GPU memory by its address; the caller keeps it alive.

    Args:
        address: of any memory.
        num_bytes: size.

    Returns:
        None if it is not all of one allocation on a GPU, or this process uses no GPU.

    Raises:
        CudaError: from the driver.
    """
    found = _host.gpu_allocation_at(address)
    if found is None or address + num_bytes > found[2]:
        return None
    return Buffer(address, num_bytes, f"cuda:{found[0]}", True, None)


def copy_to_host(buffers: Sequence[Any]) -> np.ndarray:
    """Return a copy of buffers, concatenated, in host memory.

    GPU memory is copied after the work queued in its library's current stream, as
    ``tensor.cpu()`` would.

    Args:
        buffers: as for ``as_buffer``, each in any memory.

    Returns:
        ``[total bytes]`` uint8.

    Raises:
        InvalidArgument: a buffer is not as above.
        Unavailable, CudaError: from the driver.
    """
    described = [as_buffer(buffer, argument="buffers") for buffer in buffers]
    copy = np.empty(sum(buffer.num_bytes for buffer in described), np.uint8)
    copy_into(copy, described)
    return copy


def copy_into(target: Any, buffers: Sequence[Any]) -> None:
    """Copy buffers, concatenated, to the start of host memory, as ``copy_to_host`` does.

    Args:
        target: packed, writable host memory with room for all.
        buffers: as for ``as_buffer``, each in any memory.

    Raises:
        InvalidArgument: an argument is not as above.
        Unavailable, CudaError: from the driver.
    """
    held = as_buffer(target, argument="target")
    places = [place_of(as_buffer(buffer, argument="buffers")) for buffer in buffers]
    total = sum(num_bytes for _, num_bytes, _, _ in places)
    if not held.is_host or not held.writable or held.num_bytes < total:
        raise InvalidArgument(
            f"copy_into: target must be {total} writable bytes in host memory, got "
            f"{held.num_bytes}{'' if held.writable else ' read-only'} bytes on {held.location}"
        )
    _host.gather(places, place_of(held))


def copy_from_host(source: Any, buffers: Sequence[Any]) -> None:
    """Copy host memory into consecutive buffers, until either ends.

    Args:
        source: packed host memory.
        buffers: as for ``as_buffer``, each in any memory; written after the work queued in the
            current stream of its library.

    Raises:
        InvalidArgument: an argument is not as above, or a buffer is read-only.
        Unavailable, CudaError: from the driver.
    """
    targets = [as_buffer(buffer, argument="buffers") for buffer in buffers]
    if not all(target.writable for target in targets):
        raise InvalidArgument("copy_from_host: buffers must be writable, got read-only memory")
    held = as_buffer(source, argument="source")
    if not held.is_host:
        raise InvalidArgument(f"copy_from_host: source must be host memory, got {held.location}")
    _host.scatter(place_of(held), [place_of(target) for target in targets])


class BounceBuffers:
    """Buffers in host memory, for data from a disk or a connection: those that were given, or
    stand-ins for those on GPUs.

    Attributes:
        buffers: as many as were given, of the same sizes.
    """

    def __init__(self, given: Sequence[Buffer]):
        self._given = given
        self.buffers = given
        for buffer in given:
            if not buffer.is_host:
                self.buffers = [_on_host(other) for other in given]
                break

    def deliver(self, num_bytes: int) -> None:
        """Copy this many bytes, from the first buffer on, to their destination.

        Raises:
            Unavailable, CudaError: of the driver.
        """
        if self.buffers is self._given:
            return
        for given, bounced in zip(self._given, self.buffers, strict=True):
            size = min(bounced.num_bytes, num_bytes)
            if bounced is not given:
                copy_from_host(bounced.owner[:size], [given])
            num_bytes -= size


def _on_host(buffer: Buffer) -> Buffer:
    return buffer if buffer.is_host else as_buffer(np.empty(buffer.num_bytes, np.uint8))


def place_of(buffer: Buffer) -> tuple[int, int, int, int]:
    """Return address, size, GPU (-1: host memory), and the stream in which that GPU copies it: the
    current one of the array's library, or torch's, or the legacy default stream (0).
    """
    if buffer.is_host:
        return buffer.address, buffer.num_bytes, -1, 0
    device = int(buffer.location.partition(":")[2])
    interface = getattr(buffer.owner, "__cuda_array_interface__", {})
    stream = interface.get("stream")
    if stream is None:
        on = torch.cuda.is_available()
        stream = torch.cuda.current_stream(device).cuda_stream if on else 0
    return buffer.address, buffer.num_bytes, device, stream


def with_buffers(
    op: str, buffers: Iterable[Any], writable: bool, call: Callable[..., Result], *options: Any
) -> Result:
    """Call with the buffers as the host code takes them, and options; raise for one that is
    wrong.
    """
    listed = list(buffers)
    try:
        if all(map(_is_taken, listed)):
            return call(listed, *options)
    except (BufferError, ValueError) as error:
        if isinstance(error, InvalidArgument | ChecksumError):  # not about a buffer
            raise
    if writable:
        owners = as_writable(op, listed)
    else:
        owners = [as_buffer(b, argument=f"{op}: buffers[{i}]") for i, b in enumerate(listed)]
    return call([place_of(owner) for owner in owners], *options)


def _is_taken(buffer: Any) -> bool:
    """Whether the host code takes it directly; for others it gets address and size."""
    kind = type(buffer)
    if kind is memoryview:
        return "O" not in buffer.format
    if kind is bytes or kind is bytearray:
        return True
    if isinstance(buffer, np.ndarray):
        return not buffer.dtype.hasobject
    return isinstance(buffer, bytes | bytearray)


def parts_of(
    objects: Sequence[Sequence[Buffer]],
) -> tuple[list[tuple[int, int, int, int]], list[int], int]:
    """Return what the host code takes for objects of many parts: the ``place_of`` of all parts in
    order, how many of them each object has, and how many bytes there are in all.
    """
    places, counts, num_bytes = [], [], 0
    for parts in objects:
        counts.append(len(parts))
        for part in parts:
            num_bytes += part.num_bytes
            if part.location == HOST:
                places.append((part.address, part.num_bytes, -1, 0))
            else:
                places.append(place_of(part))
    return places, counts, num_bytes


def shared_memory(num_bytes: int) -> torch.Tensor:
    """Return zeroed memory that peers on this machine can map.

    A ``TransferEngine`` copies to and from any registered memory of such a peer, but this memory is
    faster: it needs no system call, and bypasses the cache where that is better. It has no name in
    a file system, is freed with the last process that maps it, and its pages are allocated when
    first touched. After ``fork()`` both processes see the same memory.

    Args:
        num_bytes: size, at least 1.

    Returns:
        A uint8 tensor of ``[num_bytes]``; view it as any other type.

    Raises:
        InvalidArgument: the size is not a positive integer.
        OSError: there is not enough memory.
    """
    num_bytes = as_integer("shared_memory", "num_bytes", num_bytes, 1, (1 << 63) - 1)
    return torch.from_numpy(np.frombuffer(memoryview(_host.SharedMemory(num_bytes)), np.uint8))


def _from_tensor(tensor: torch.Tensor, argument: str) -> Buffer:
    if tensor.layout != torch.strided or tensor.is_nested:
        layout = "nested" if tensor.is_nested else tensor.layout
        raise InvalidArgument(f"{argument} must be a dense tensor, got a {layout} one")
    if tensor.is_conj() or tensor.is_neg():
        bit = "conj" if tensor.is_conj() else "neg"
        raise InvalidArgument(
            f"{argument} must have its values in its memory, got a tensor with the {bit} bit: "
            f"call resolve_{bit}()"
        )
    if not tensor.is_contiguous():
        raise InvalidArgument(
            f"{argument} must be packed, got shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        )
    if tensor.device.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"{argument} must be on cpu or cuda, got {tensor.device}")
    location = f"{tensor.device.type}:{tensor.device.index or 0}"
    # The owner is the storage: a tensor can be given another (t.data = ..., module.half()).
    storage = tensor.untyped_storage()
    return Buffer(tensor.data_ptr(), tensor.nbytes, location, True, storage)


def _from_cuda_array(array: Any, argument: str) -> Buffer:
    interface = array.__cuda_array_interface__
    itemsize = np.dtype(interface["typestr"]).itemsize
    packed, expected = interface.get("strides"), itemsize
    if packed is not None:
        for extent, stride in zip(reversed(interface["shape"]), reversed(packed), strict=True):
            if extent > 1 and stride != expected:
                raise InvalidArgument(f"{argument} must be packed, got strides {packed}")
            expected *= extent
    address, readonly = interface["data"]
    num_bytes = itemsize * int(np.prod(interface["shape"], dtype=np.int64))
    ordinal = array.device.id if hasattr(array, "device") else 0
    return Buffer(address, num_bytes, f"cuda:{ordinal}", not readonly, array)
