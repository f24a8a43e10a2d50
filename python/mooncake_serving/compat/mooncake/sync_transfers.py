"""The calls of ``TransferEngine`` that return when everything has arrived."""

from collections.abc import Sequence

from .codes import ERR_INVALID_ARGUMENT, returns
from .notify import TransferNotify
from .transfers import READ, WRITE, TransferOpcode, Transfers


class SyncTransfers(Transfers):
    """Each returns 0, or -1; it may take ``MC_TRANSFER_TIMEOUT`` plus 1 ns a byte."""

    @returns(ERR_INVALID_ARGUMENT)
    def transfer_sync_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Write one block, and wait until it is at the peer: 0, else -1."""
        return self._submit(
            target_hostname, [buffer], [peer_buffer_address], [length], WRITE
        ).wait()

    @returns(ERR_INVALID_ARGUMENT)
    def transfer_sync_read(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Read one block, and wait until it is here: 0, else -1."""
        return self._submit(target_hostname, [buffer], [peer_buffer_address], [length], READ).wait()

    @returns(ERR_INVALID_ARGUMENT)
    def transfer_sync(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Move one block, and notify the peer when it is there: 0, else -1."""
        blocks = [buffer], [peer_buffer_address], [length]
        return self._submit(target_hostname, *blocks, opcode, notify).wait()

    @returns(ERR_INVALID_ARGUMENT)
    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Write blocks, however many, and wait until all are at the peer: 0, else -1."""
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, WRITE).wait()

    @returns(ERR_INVALID_ARGUMENT)
    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Read blocks, however many, and wait until all are here: 0, else -1."""
        return self._submit(target_hostname, buffers, peer_buffer_addresses, lengths, READ).wait()

    @returns(ERR_INVALID_ARGUMENT)
    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
        transport_hint: str = "",
    ) -> int:
        """Move blocks, and notify the peer when all are there: 0, else -1."""
        blocks = buffers, peer_buffer_addresses, lengths
        return self._submit(target_hostname, *blocks, opcode, notify).wait()
