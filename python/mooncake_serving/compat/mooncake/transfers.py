"""The common part of the calls that move memory."""

import enum
from typing import Any

from mooncake_kernels.errors import InvalidArgument

from . import names
from .batches import Batch, columns_of, submit
from .lifecycle import Lifecycle
from .notify import TransferNotify, encode


class TransferOpcode(enum.IntEnum):
    """Direction of a transfer, seen from its initiator."""

    Read = 0
    Write = 1


READ, WRITE = TransferOpcode.Read, TransferOpcode.Write


class Transfers(Lifecycle):
    """One-sided reads and writes.

    Throughout, ``target_hostname`` is the peer's ``"host:port"``, ``buffers`` are addresses of
    registered memory of this engine, ``peer_buffer_addresses`` of the peer's, ``lengths`` are in
    bytes; each is a list, tuple or array. ``transport_hint`` is ignored.
    """

    def _submit(
        self,
        target_hostname: str,
        buffers: Any,
        peer_buffer_addresses: Any,
        lengths: Any,
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
    ) -> Batch:
        running = self._running()
        if not isinstance(opcode, TransferOpcode):
            raise InvalidArgument(f"opcode must be a TransferOpcode, got {opcode!r:.80}")
        return submit(
            running.engine,
            running.peers,
            names.peer_name(target_hostname, running.metadata, "target_hostname"),
            columns_of(buffers, peer_buffer_addresses, lengths),
            reads=opcode == READ,
            notify=encode(notify),
            timeout_s=running.timeout_s,
        )
