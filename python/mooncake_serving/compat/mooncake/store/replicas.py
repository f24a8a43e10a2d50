"""Where the copies of a value are, in Mooncake's classes."""

import enum
from dataclasses import dataclass


class ReplicaStatus(enum.IntEnum):
    """State of a copy. Those that are reported are ``COMPLETE``."""

    UNDEFINED = 0
    INITIALIZED = 1
    PROCESSING = 2
    COMPLETE = 3
    REMOVED = 4
    FAILED = 5


@dataclass(frozen=True)
class Descriptor:
    """A copy in memory.

    Attributes:
        size: bytes of the value.
        buffer_address: where it is in this process's mapping of the pool; 0: on another host.
        transport_endpoint: its process, a name as of ``get_hostname``.
    """

    size: int
    buffer_address: int
    transport_endpoint: str


@dataclass(frozen=True)
class MemoryDescriptor:
    """The description of a copy in memory."""

    buffer_descriptor: Descriptor


@dataclass(frozen=True)
class ReplicaDescriptor:
    """A copy of a value, in memory or on the SSD of its process."""

    _size: int
    _memory: MemoryDescriptor | None
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        return self._memory is not None

    def is_disk_replica(self) -> bool:
        return False

    def is_local_disk_replica(self) -> bool:
        return self._memory is None

    def get_memory_descriptor(self) -> MemoryDescriptor:
        """Raise a ``RuntimeError``, as Mooncake does, for a copy on an SSD."""
        if self._memory is None:
            raise RuntimeError(
                "get_memory_descriptor: the replica must be in memory, got one on an SSD"
            )
        return self._memory

    def get_disk_descriptor(self) -> None:
        """Raise a ``RuntimeError``: Mooncake has it for files that are shared, which none is."""
        raise RuntimeError("get_disk_descriptor: the replica must be in a shared file, got another")


def replica(size: int, address: int, endpoint: str) -> ReplicaDescriptor:
    """Make the descriptor of a value's copy in memory."""
    return ReplicaDescriptor(size, MemoryDescriptor(Descriptor(size, address, endpoint)))


def disk_replica(size: int) -> ReplicaDescriptor:
    """Make the descriptor of a value's copy on the SSD of its process."""
    return ReplicaDescriptor(size, None)


def size_of_value(known: ReplicaDescriptor) -> int:
    """Size of the value in bytes."""
    return known._size
