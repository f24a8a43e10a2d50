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
    """A copy of a value. All of them are in memory."""

    _memory: MemoryDescriptor
    status: ReplicaStatus = ReplicaStatus.COMPLETE

    def is_memory_replica(self) -> bool:
        return True

    def is_disk_replica(self) -> bool:
        return False

    def is_local_disk_replica(self) -> bool:
        return False

    def get_memory_descriptor(self) -> MemoryDescriptor:
        return self._memory

    def get_disk_descriptor(self) -> None:
        """Raise a ``RuntimeError``, as Mooncake does for a copy in memory."""
        raise RuntimeError("get_disk_descriptor: the replica must be on a disk, got one in memory")


def replica(size: int, address: int, endpoint: str) -> ReplicaDescriptor:
    """Make the descriptor of a value's copy."""
    return ReplicaDescriptor(MemoryDescriptor(Descriptor(size, address, endpoint)))


def size_of_value(known: ReplicaDescriptor) -> int:
    """Size of the value in bytes."""
    return known.get_memory_descriptor().buffer_descriptor.size
