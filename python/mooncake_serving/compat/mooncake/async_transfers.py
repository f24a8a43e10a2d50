"""The calls of ``TransferEngine`` that begin a transfer, and those that check for its end."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

from mooncake_kernels.errors import InvalidArgument, TransferError

from .batches import Batch
from .codes import ERR_INVALID_ARGUMENT, as_natural, log, returns
from .transfers import READ, WRITE, TransferOpcode, Transfers


class AsyncTransfers(Transfers):
    """An id is valid for ``get_batch_transfer_status`` and for ``transfer_check_status``."""

    def __init__(self) -> None:
        super().__init__()
        self._ids = itertools.count(1)
        self._batches: dict[int, Batch] = {}

    @returns(0)
    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Begin to write blocks: an id for one of the two calls below, else 0."""
        return self._begin(target_hostname, buffers, peer_buffer_addresses, lengths, WRITE)

    @returns(0)
    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        transport_hint: str = "",
    ) -> int:
        """Begin to read blocks: an id, else 0."""
        return self._begin(target_hostname, buffers, peer_buffer_addresses, lengths, READ)

    @returns(0)
    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        transport_hint: str = "",
    ) -> int:
        """Begin to move blocks: an id, else 0."""
        return self._begin(target_hostname, buffers, peer_buffer_addresses, lengths, opcode)

    @returns(ERR_INVALID_ARGUMENT)
    def transfer_submit_write(
        self,
        target_hostname: str,
        buffer: int,
        peer_buffer_address: int,
        length: int,
        transport_hint: str = "",
    ) -> int:
        """Begin to write one block: an id, else -1."""
        return self._begin(target_hostname, [buffer], [peer_buffer_address], [length], WRITE)

    @returns(ERR_INVALID_ARGUMENT)
    def get_batch_transfer_status(self, batch_ids: Iterable[int]) -> int:
        """Wait for the end of all of these: 0, or -1 if one failed or is unknown.

        Their ids are then invalid, and their local memory is no longer touched.
        """
        if not isinstance(batch_ids, Iterable):
            raise InvalidArgument(f"batch_ids must be a list of integers, got {batch_ids!r:.80}")
        failed = 0
        for batch_id in batch_ids:
            try:
                self._take(batch_id).wait()
            except (InvalidArgument, TransferError) as error:
                log.error("get_batch_transfer_status: %s", error)
                failed = ERR_INVALID_ARGUMENT
        return failed

    @returns(ERR_INVALID_ARGUMENT)
    def transfer_check_status(self, batch_id: int) -> int:
        """Check a transfer, without waiting.

        Returns:
            0 while it is in flight; then, once: 1 if it succeeded, -2 if it timed out, -1 if it
            failed otherwise or is unknown.
        """
        batch = self._batches.get(as_natural("batch_id", batch_id))
        if batch is not None and not batch.done:
            return 0
        try:
            self._take(batch_id).wait()
        except TransferError as error:
            log.error("transfer_check_status: %s", error)
            return -2 if error.timed_out else -1
        return 1

    def _begin(
        self, target: str, buffers: Any, addresses: Any, lengths: Any, opcode: TransferOpcode
    ) -> int:
        batch = self._submit(target, buffers, addresses, lengths, opcode)
        batch_id = next(self._ids)
        self._batches[batch_id] = batch
        return batch_id

    def _take(self, batch_id: int) -> Batch:
        batch = self._batches.pop(as_natural("batch_id", batch_id), None)
        if batch is None:
            raise InvalidArgument(f"batch_id must be of a batch that is under way, got {batch_id}")
        return batch
