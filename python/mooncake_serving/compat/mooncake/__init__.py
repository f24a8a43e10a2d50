"""The Python API of Mooncake's transfer engine (PyPI: mooncake-transfer-engine) on ours.

Callers of ``mooncake.engine`` change the import, and nothing else::

    from mooncake_serving.compat.mooncake import TransferEngine, TransferNotify, TransferOpcode

    engine = TransferEngine()
    assert engine.initialize("10.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(cache.data_ptr(), cache.nbytes) == 0
    assert engine.transfer_sync_write("10.0.0.2:4711", address, peer_address, num_bytes) == 0

Calls that return an integer do not raise: a failure returns one of Mooncake's codes, and its reason
is logged as an error of the logger ``mooncake_serving.compat.mooncake``. ``store`` stands in for
``mooncake.store``. docs/mooncake_compat.md has the table of all calls and every difference.
"""

from . import store
from .codes import (
    ERR_ADDRESS_NOT_REGISTERED,
    ERR_ADDRESS_OVERLAPPED,
    ERR_DNS,
    ERR_INVALID_ARGUMENT,
    ERR_NOT_IMPLEMENTED,
    ERR_SOCKET,
)
from .engine import TransferEngine
from .notify import TransferNotify
from .store import MooncakeDistributedStore, ReplicateConfig
from .transfers import TransferOpcode

Read, Write = TransferOpcode.Read, TransferOpcode.Write
SUPPORT_CUDA = SUPPORT_EFA = SUPPORT_HIP = SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = SUPPORT_MUSA = False

__all__ = [
    "ERR_ADDRESS_NOT_REGISTERED",
    "ERR_ADDRESS_OVERLAPPED",
    "ERR_DNS",
    "ERR_INVALID_ARGUMENT",
    "ERR_NOT_IMPLEMENTED",
    "ERR_SOCKET",
    "MooncakeDistributedStore",
    "Read",
    "ReplicateConfig",
    "SUPPORT_CUDA",
    "SUPPORT_EFA",
    "SUPPORT_HIP",
    "SUPPORT_INTRA_NVLINK",
    "SUPPORT_MNNVL",
    "SUPPORT_MUSA",
    "TransferEngine",
    "TransferNotify",
    "TransferOpcode",
    "Write",
    "store",
]
