"""``TransferEngine``: all of its calls."""

from typing import Any, NoReturn

from mooncake_kernels.errors import Unavailable

from .async_transfers import AsyncTransfers
from .memory_calls import MemoryCalls
from .sync_transfers import SyncTransfers
from .transfers import TransferOpcode as _TransferOpcode


class TransferEngine(MemoryCalls, SyncTransfers, AsyncTransfers):
    """Mooncake's ``TransferEngine``: registers memory, and moves it from and to peers.

    Thread-safe: up to eight calls to one peer run in parallel, each over a connection of its own.
    An engine that is dropped is closed.
    """

    TransferOpcode = _TransferOpcode

    def transfer_write_on_cuda(self, *arguments: Any, **named: Any) -> NoReturn:
        """Not supported yet, like the next three: a stream cannot be made to wait for a transfer.

        Raises:
            Unavailable: always.
        """
        raise Unavailable(
            "the _on_cuda calls are not here yet: synchronize the stream, and use the calls "
            "without it, which move memory of GPUs as well"
        )

    transfer_read_on_cuda = transfer_write_on_cuda
    batch_transfer_write_on_cuda = transfer_write_on_cuda
    batch_transfer_read_on_cuda = transfer_write_on_cuda
