"""``nixl._bindings``: the names that engines import from it."""

import enum

from .agent import NIXL_INIT_AGENT
from .core import DEFAULT_COMM_PORT, nixl_thread_sync_t, nixlAgent, nixlAgentConfig
from .descriptors import nixl_mem_t, nixlRegDList, nixlXferDList
from .errors import (
    nixlBackendError,
    nixlCancelledError,
    nixlInvalidParamError,
    nixlMismatchError,
    nixlNotAllowedError,
    nixlNoTelemetryError,
    nixlNotFoundError,
    nixlNotPostedError,
    nixlNotSupportedError,
    nixlRemoteDisconnectError,
    nixlRepostActiveError,
    nixlUnknownError,
)
from .transfers import nixlXferTelemetry


class nixl_xfer_op_t(enum.IntEnum):  # noqa: N801
    """Directions."""

    NIXL_READ = 0
    NIXL_WRITE = 1


DRAM_SEG, VRAM_SEG, BLK_SEG, OBJ_SEG, FILE_SEG = nixl_mem_t
NIXL_READ, NIXL_WRITE = nixl_xfer_op_t
NIXL_THREAD_SYNC_NONE = nixl_thread_sync_t.NIXL_THREAD_SYNC_NONE
NIXL_THREAD_SYNC_STRICT = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
NIXL_THREAD_SYNC_RW = nixl_thread_sync_t.NIXL_THREAD_SYNC_RW
NIXL_THREAD_SYNC_DEFAULT = nixl_thread_sync_t.NIXL_THREAD_SYNC_DEFAULT
HAVE_UCX_GPU_DEVICE_API = False

__all__ = [
    "BLK_SEG",
    "DEFAULT_COMM_PORT",
    "DRAM_SEG",
    "FILE_SEG",
    "HAVE_UCX_GPU_DEVICE_API",
    "NIXL_INIT_AGENT",
    "NIXL_READ",
    "NIXL_THREAD_SYNC_DEFAULT",
    "NIXL_THREAD_SYNC_NONE",
    "NIXL_THREAD_SYNC_RW",
    "NIXL_THREAD_SYNC_STRICT",
    "NIXL_WRITE",
    "OBJ_SEG",
    "VRAM_SEG",
    "nixlAgent",
    "nixlAgentConfig",
    "nixlBackendError",
    "nixlCancelledError",
    "nixlInvalidParamError",
    "nixlMismatchError",
    "nixlNoTelemetryError",
    "nixlNotAllowedError",
    "nixlNotFoundError",
    "nixlNotPostedError",
    "nixlNotSupportedError",
    "nixlRegDList",
    "nixlRemoteDisconnectError",
    "nixlRepostActiveError",
    "nixlUnknownError",
    "nixlXferDList",
    "nixlXferTelemetry",
    "nixl_mem_t",
    "nixl_thread_sync_t",
    "nixl_xfer_op_t",
]
