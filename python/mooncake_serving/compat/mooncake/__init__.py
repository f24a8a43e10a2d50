"""The Python API of Mooncake's transfer engine (PyPI: mooncake-transfer-engine) on ours.

Callers of ``mooncake.engine`` change the import, and nothing else::

    from mooncake_serving.compat.mooncake import TransferEngine, TransferNotify, TransferOpcode

    engine = TransferEngine()
    assert engine.initialize("10.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(cache.data_ptr(), cache.nbytes) == 0
    assert engine.transfer_sync_write("10.0.0.2:4711", address, peer_address, num_bytes) == 0

Calls that return an integer do not raise: a failure returns one of Mooncake's codes, and its reason
is logged as an error of the logger ``mooncake_serving.compat.mooncake``. ``engine``, ``store`` and
``mooncake_config`` stand in for ``mooncake.engine`` and so on, under Mooncake's own name after
``install()`` or ``python -m mooncake_kernels drop-in enable mooncake``.
docs/serving/mooncake_compat.md has the table of all calls and every difference.
"""

from . import engine, mooncake_config, store
from .codes import (
    ERR_ADDRESS_NOT_REGISTERED,
    ERR_ADDRESS_OVERLAPPED,
    ERR_DNS,
    ERR_INVALID_ARGUMENT,
    ERR_NOT_IMPLEMENTED,
    ERR_SOCKET,
)
from .engine import (
    SUPPORT_CUDA,
    SUPPORT_EFA,
    SUPPORT_HIP,
    SUPPORT_INTRA_NVLINK,
    SUPPORT_MNNVL,
    SUPPORT_MUSA,
    Read,
    TransferEngine,
    TransferNotify,
    TransferOpcode,
    Write,
)
from .installing import install
from .store import MooncakeDistributedStore, ReplicateConfig

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
    "engine",
    "install",
    "mooncake_config",
    "store",
]
