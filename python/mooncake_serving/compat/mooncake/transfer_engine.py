"""``TransferEngine``: all of its calls."""

from .async_transfers import AsyncTransfers
from .cuda_transfers import CudaTransfers
from .memory_calls import MemoryCalls
from .sync_transfers import SyncTransfers
from .transfers import TransferOpcode as _TransferOpcode


class TransferEngine(MemoryCalls, SyncTransfers, AsyncTransfers, CudaTransfers):
    """Mooncake's ``TransferEngine``: registers memory, and moves it from and to peers.

    Thread-safe: up to eight calls to one peer run in parallel, each over a connection of its own.
    An engine that is dropped is closed.
    """

    TransferOpcode = _TransferOpcode
