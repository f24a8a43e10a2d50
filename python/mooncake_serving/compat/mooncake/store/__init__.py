"""The Python API of Mooncake's store (``mooncake.store``) on ours.

Callers of ``mooncake.store`` change the import, and the address of the master::

    from mooncake_serving.compat.mooncake.store import MooncakeDistributedStore, ReplicateConfig

    store = MooncakeDistributedStore()
    path = "/dev/shm/kv"  # instead of the master: the pool that the processes of a host share
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", 4 << 30, 64 << 20, "tcp", "", path) == 0
    assert store.put("a", b"value") == 0 and store.get("a") == b"value"

Calls return Mooncake's codes and do not raise; the reason of a failure is logged as an error of the
logger ``mooncake_serving.compat.mooncake.store``. docs/serving/mooncake_store.md lists all
calls and every difference.
"""

from .buffer_pool import BufferLease, BufferPool
from .buffers import BufferHandle, MooncakeHostMemAllocator
from .codes import (
    CHECKSUM_MISMATCH,
    FILE_NOT_FOUND,
    INTERNAL_ERROR,
    INVALID_PARAMS,
    NO_AVAILABLE_HANDLE,
    OBJECT_ALREADY_EXISTS,
    OBJECT_NOT_FOUND,
    RPC_FAIL,
    TASK_NOT_FOUND,
    TRANSFER_FAIL,
)
from .distributed_store import MooncakeDistributedStore
from .replicas import (
    Descriptor,
    MemoryDescriptor,
    QueryTaskResponse,
    ReplicaDescriptor,
    ReplicaStatus,
    TaskStatus,
    TaskType,
)
from .replicate_config import ObjectDataType, ReplicateConfig, SoftPinAction
from .tensor_layout import HEADER_BYTES, ParallelAxis, ReadTarget, TensorParallelism

# The values of the enumerations are names of the module, too, as in Mooncake's, where PROCESSING
# and FAILED are those of a task.
(
    UNKNOWN,
    KVCACHE,
    TENSOR,
    WEIGHT,
    SAMPLE,
    ACTIVATION,
    GRADIENT,
    OPTIMIZER_STATE,
    METADATA,
    GENERAL,
) = ObjectDataType
UNDEFINED, INITIALIZED, _, COMPLETE, REMOVED, _ = ReplicaStatus
PENDING, PROCESSING, FAILED, SUCCESS = TaskStatus
REPLICA_COPY, REPLICA_MOVE = TaskType
RegisteredBufferLease, RegisteredBufferPool = BufferLease, BufferPool  # Mooncake's other names

__all__ = [
    "ACTIVATION",
    "CHECKSUM_MISMATCH",
    "COMPLETE",
    "FAILED",
    "FILE_NOT_FOUND",
    "GENERAL",
    "GRADIENT",
    "INITIALIZED",
    "INTERNAL_ERROR",
    "INVALID_PARAMS",
    "KVCACHE",
    "METADATA",
    "NO_AVAILABLE_HANDLE",
    "OBJECT_ALREADY_EXISTS",
    "OBJECT_NOT_FOUND",
    "OPTIMIZER_STATE",
    "PENDING",
    "PROCESSING",
    "REMOVED",
    "REPLICA_COPY",
    "REPLICA_MOVE",
    "RPC_FAIL",
    "SAMPLE",
    "SUCCESS",
    "TASK_NOT_FOUND",
    "TENSOR",
    "TRANSFER_FAIL",
    "UNDEFINED",
    "UNKNOWN",
    "WEIGHT",
    "BufferHandle",
    "BufferLease",
    "BufferPool",
    "Descriptor",
    "MemoryDescriptor",
    "MooncakeDistributedStore",
    "MooncakeHostMemAllocator",
    "ObjectDataType",
    "ParallelAxis",
    "QueryTaskResponse",
    "ReadTarget",
    "RegisteredBufferLease",
    "RegisteredBufferPool",
    "ReplicaDescriptor",
    "ReplicaStatus",
    "ReplicateConfig",
    "SoftPinAction",
    "TaskStatus",
    "TaskType",
    "TensorParallelism",
]


def _tensor_metadata_size() -> int:
    """Bytes that precede a tensor's elements. ``mooncake.structured_object_store`` asks for it."""
    return HEADER_BYTES
