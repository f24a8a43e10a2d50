"""How a ``TransferEngine`` is asked to move memory."""

from typing import Any

from . import _host
from ._transfer_arguments import Descriptors, Integers, as_columns, as_deadline, as_rows
from ._transfer_handles import Peer, Ticket
from ._transfer_pools import Blocks, as_paged
from .errors import InvalidArgument


class Requests:
    """The calls of ``TransferEngine`` that move something."""

    name: str
    _engine: _host.TransferEngine
    _closed: bool

    def write(
        self,
        peer: Peer,
        descriptors: Descriptors,
        *,
        deadline_s: float | None = None,
        notify: bytes | None = None,
    ) -> Ticket:
        """Write local memory to a peer's.

        Equivalent to, with ``memory`` being that of either side::

            for local_address, remote_address, num_bytes in descriptors:
                peer.memory[remote_address:][:num_bytes] = memory[local_address:][:num_bytes]
            peer.notifications.append((engine.name, notify))

        Every descriptor must lie inside one region at either end. The peer checks all of them
        before the first byte moves: a request refused for one has changed nothing. Whether its
        queue has room for ``notify`` shows only after the data: if not, the transfer fails, but
        the bytes are written, as the error's ``num_bytes_done`` says. A request above 8192
        descriptors or 16 MiB (read: 256 MiB) is confirmed in parts: if it fails on the way,
        ``num_bytes_done`` says how much has arrived.

        No two targets of a request may overlap. Source and target may do so only over ``local``,
        where a descriptor is copied as if through a buffer; else what the target then holds is
        undefined. Large requests of one engine to one peer overlap in time. A notification comes
        after the data of its own request and of all earlier ones to that peer.

        What a lost connection had under way is tried again over another one, each part up to three
        times; a notification never is. A peer that was restarted meanwhile is noticed, and nothing
        is written to it.

        Args:
            peer: from ``open``.
            descriptors: (local_address, remote_address, num_bytes) each, also as ``[n, 3]``
                integers. May be empty if ``notify`` is given. Copied before the call returns; the
                memory itself must stay as it is until the ticket is done.
            deadline_s: seconds from now; None: the setting ``deadline_s``.
            notify: at most 64 KiB, delivered to the peer after the data is visible there. A file
                has nobody to be notified: None.

        Returns:
            A ``Ticket``.

        Raises:
            InvalidArgument: a descriptor is not inside the registered regions of this engine, or
                is empty, or its target overlaps another's; the message names it. What the peer
                refuses is the ticket's error, which names it, too; so is what a disk does: that
                names the offset, and ``num_bytes_done`` what it has moved.
        """
        return self._submit_rows("write", peer, descriptors, deadline_s, notify)

    def read(
        self,
        peer: Peer,
        descriptors: Descriptors,
        *,
        deadline_s: float | None = None,
        notify: bytes | None = None,
    ) -> Ticket:
        """Read a peer's memory into local memory.

        Equivalent to::

            for local_address, remote_address, num_bytes in descriptors:
                memory[local_address:][:num_bytes] = peer.memory[remote_address:][:num_bytes]
            peer.notifications.append((engine.name, notify))

        Args:
            peer: from ``open``.
            descriptors: as for ``write``. The local regions must be writable memory.
            deadline_s: seconds from now; None: the setting ``deadline_s``.
            notify: at most 64 KiB, delivered to the peer after all the data has arrived here.

        Returns:
            A ``Ticket``.

        Raises:
            InvalidArgument: as for ``write``.
        """
        return self._submit_rows("read", peer, descriptors, deadline_s, notify)

    def write_blocks(
        self,
        peer: Peer,
        local_addresses: Integers | Blocks,
        remote_addresses: Integers | Blocks,
        sizes: Integers | int | None = None,
        *,
        deadline_s: float | None = None,
        notify: bytes | None = None,
    ) -> Ticket:
        """Write many blocks, given as arrays or of pools: ``write`` without an object a block.

        Args:
            peer: from ``open``.
            local_addresses: ``[n]`` integers; or blocks of a pool, ``pool.blocks(ids)``.
            remote_addresses: ``[n]`` integers; or as many blocks of the peer's pool, which has
                blocks of the same size, and as many planes.
            sizes: ``[n]`` integers, or one size in bytes for all; None for blocks of pools.
            deadline_s: seconds from now; None: the setting ``deadline_s``.
            notify: at most 64 KiB, delivered to the peer after the data is visible there.

        Returns:
            A ``Ticket``.

        Raises:
            InvalidArgument: as for ``write``, where block i, in plane p of pools, is
                ``descriptors[p * n + i]``; or an id is not of its pool, or the target of two.
        """
        where = local_addresses, remote_addresses, sizes
        return self._submit_blocks("write", peer, where, deadline_s, notify)

    def read_blocks(
        self,
        peer: Peer,
        local_addresses: Integers | Blocks,
        remote_addresses: Integers | Blocks,
        sizes: Integers | int | None = None,
        *,
        deadline_s: float | None = None,
        notify: bytes | None = None,
    ) -> Ticket:
        """Read many blocks, given as arrays or of pools: ``read`` without an object a block.

        Args:
            peer: from ``open``.
            local_addresses: ``[n]`` integers; or blocks of a pool, ``pool.blocks(ids)``.
            remote_addresses: ``[n]`` integers; or as many blocks of the peer's pool, which has
                blocks of the same size, and as many planes.
            sizes: ``[n]`` integers, or one size in bytes for all; None for blocks of pools.
            deadline_s: seconds from now; None: the setting ``deadline_s``.
            notify: at most 64 KiB, delivered to the peer after all the data has arrived here.

        Returns:
            A ``Ticket``.

        Raises:
            InvalidArgument: as for ``write``, where block i, in plane p of pools, is
                ``descriptors[p * n + i]``; or an id is not of its pool, or the target of two.
        """
        where = local_addresses, remote_addresses, sizes
        return self._submit_blocks("read", peer, where, deadline_s, notify)

    def _submit_rows(
        self,
        op: str,
        peer: Peer,
        descriptors: Descriptors,
        deadline_s: float | None,
        notify: bytes | None,
    ) -> Ticket:
        options = self._check_call(op, peer, notify, deadline_s)
        if type(descriptors) is list:
            ticket = self._engine.submit_rows(peer._peer, op == "read", descriptors, *options)
            if ticket is not None:
                return Ticket(ticket, peer.transport)
        columns = as_rows(op, descriptors)
        ticket = self._engine.submit(peer._peer, op == "read", *columns, *options)
        return Ticket(ticket, peer.transport)

    def _submit_blocks(
        self,
        verb: str,
        peer: Peer,
        where: tuple[Any, Any, Any],
        deadline_s: float | None,
        notify: bytes | None,
    ) -> Ticket:
        op, reads = f"{verb}_blocks", verb == "read"
        options = self._check_call(op, peer, notify, deadline_s)
        if isinstance(where[0], Blocks) or isinstance(where[1], Blocks):
            paged = as_paged(op, *where)
            ticket = self._engine.submit_paged(peer._peer, reads, *paged, *options)
        else:
            columns = as_columns(op, *where)
            ticket = self._engine.submit(peer._peer, reads, *columns, *options)
        return Ticket(ticket, peer.transport)

    def _check_call(
        self, op: str, peer: Peer, notify: bytes | None, deadline_s: float | None
    ) -> tuple[bytes | None, float]:
        self._check_open(op)
        if not isinstance(peer, Peer) or peer._engine is not self._engine:
            raise InvalidArgument(
                f"{op}: peer must be a Peer that this engine opened, got {peer!r}"
            )
        if peer.closed:
            raise InvalidArgument(f"{op}: peer must be open, got the closed {peer.name}")
        if notify is not None and not isinstance(notify, (bytes, bytearray, memoryview)):
            raise InvalidArgument(f"{op}: notify must be bytes, got {type(notify).__name__}")
        return None if notify is None else bytes(notify), as_deadline(op, deadline_s)

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise InvalidArgument(f"{op}: the engine {self.name} is closed")
