"""The names of ``mooncake.engine``: this module stands in its place."""

from .notify import TransferNotify
from .transfer_engine import TransferEngine
from .transfers import TransferOpcode

Read, Write = TransferOpcode.Read, TransferOpcode.Write
SUPPORT_CUDA = SUPPORT_EFA = SUPPORT_HIP = SUPPORT_INTRA_NVLINK = False
SUPPORT_MNNVL = SUPPORT_MUSA = False

__all__ = [
    "Read",
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
]
