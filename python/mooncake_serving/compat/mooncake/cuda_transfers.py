"""The calls of ``TransferEngine`` that put a transfer into a CUDA stream."""

from collections.abc import Sequence
from typing import Any

from . import names
from .batches import columns_of
from .codes import ERR_INVALID_ARGUMENT, as_natural, returns
from .transfers import READ, WRITE, TransferOpcode, Transfers


class CudaTransfers(Transfers):
    """Each enqueues a transfer, and returns: it begins when the stream arrives there.

    What is behind it in the stream waits until it has ended. ``stream_ptr`` is the stream's handle;
    0 is the default stream of the thread's current GPU. Only what no GPU has to copy can be moved:
    host memory at both ends; over the protocol ``rdma``, to another machine, any memory.

    A failure is logged. The stream goes on, but no other transfer that this engine has enqueued by
    then begins any more. The next of these calls raises it, or ``check_transfers_on_cuda`` returns
    -1; then the engine can be used again.

    Raises:
        TransferError: an earlier transfer in a stream has failed, or the peer cannot be opened.
            After this and all below, nothing was enqueued.
        Unavailable: a GPU would have to copy; no GPU is in use; the stream is being captured.
        InvalidArgument: an argument is wrong; a buffer is not registered.
        CudaError: from the driver.
    """

    def transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Enqueue writing one block."""
        blocks = [buffer], [peer_buffer_address], [length]
        self._enqueue("transfer_write_on_cuda", target_hostname, blocks, WRITE, stream_ptr)

    def transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Enqueue reading one block."""
        blocks = [buffer], [peer_buffer_address], [length]
        self._enqueue("transfer_read_on_cuda", target_hostname, blocks, READ, stream_ptr)

    def batch_transfer_write_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Enqueue writing blocks."""
        blocks = buffers, peer_buffer_addresses, lengths
        self._enqueue("batch_transfer_write_on_cuda", target_hostname, blocks, WRITE, stream_ptr)

    def batch_transfer_read_on_cuda(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        stream_ptr: int = 0,
        transport_hint: str = "",
    ) -> None:
        """Enqueue reading blocks."""
        blocks = buffers, peer_buffer_addresses, lengths
        self._enqueue("batch_transfer_read_on_cuda", target_hostname, blocks, READ, stream_ptr)

    @returns(ERR_INVALID_ARGUMENT)
    def check_transfers_on_cuda(self) -> int:
        """Check those that have ended, as all before a synchronization of their stream have.

        Not in Mooncake, which ends the process when one fails.

        Returns:
            0, or -1 if one has failed since the last check, or call above that raised it.
        """
        self._running().streams.check()
        return 0

    def _enqueue(
        self,
        call: str,
        target_hostname: str,
        blocks: tuple[Any, Any, Any],
        opcode: TransferOpcode,
        stream_ptr: int,
    ) -> None:
        running = self._running(call)
        running.streams.enqueue(
            call,
            names.peer_name(target_hostname, running.metadata, "target_hostname"),
            columns_of(*blocks),
            reads=opcode == READ,
            stream=as_natural("stream_ptr", stream_ptr),
        )
