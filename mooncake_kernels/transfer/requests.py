"""The requests by which a ``TransferEngine`` moves memory."""

from typing import Any

import numpy as np

from .. import _host, config
from .._arguments import as_bool, as_triples
from ..errors import InvalidArgument
from .arguments import Descriptors, Integers, as_columns, as_deadline
from .fences import After, as_fence
from .handles import Peer, Ticket
from .pools import Blocks, Where, as_paged

ROW = "(local_address, remote_address, num_bytes)"


class Requests:
    """The calls of ``TransferEngine`` that move data."""

    name: str
    _engine: _host.TransferEngine
    _closed: bool
    _checksum: bool

    def write(
        self,
        peer: Peer,
        descriptors: Descriptors,
        *,
        deadline_s: float | None = None,
        notify: bytes | None = None,
        after: After = None,
        checksum: bool | None = None,
    ) -> Ticket:
        """Write local memory to a peer's.

        Equivalent to, where ``memory`` is that of either side::

            for local_address, remote_address, num_bytes in descriptors:
                peer.memory[remote_address:][:num_bytes] = memory[local_address:][:num_bytes]
            peer.notifications.append((engine.name, notify))

        Every descriptor must lie inside one region at either end. The peer checks all of them
        before the first byte moves: a request with a bad one is refused and changes nothing.
        Whether its queue has room for ``notify`` is known only after the data: if not, the transfer
        fails, but the bytes are written, as the error's ``num_bytes_done`` says.

        Reads and writes alike are confirmed in parts: if a request fails on the way, the error's
        ``num_bytes_done`` says how much has arrived, and ``delivered`` which descriptors. A part
        has at most 8192 descriptors, of which neighbours at both ends count as one, and 16 MiB,
        except over ``local``. A request above 2 MiB (8 MiB if all that the peer offers is mapped)
        to a peer with several connections (the setting ``transfer_lanes``) is cut into about four
        parts for each of them, of at least 1 MiB.

        No two targets of a request may overlap. Source and target may overlap only over ``local``,
        where a descriptor is copied as if through a buffer; otherwise the target's contents are
        undefined. Large requests of one engine to one peer overlap in time. A notification arrives
        after the data of its own request and of all earlier ones to that peer.

        Parts in flight on a lost connection are retried over another one, each up to three times; a
        notification never is. If the peer was restarted meanwhile, the engine notices and writes
        nothing to it.

        Args:
            peer: from ``open``.
            descriptors: (local_address, remote_address, num_bytes) each, also as ``[n, 3]``
                integers. May be empty if ``notify`` is given. Copied before the call returns; the
                memory itself must not change until the ticket is done.
            deadline_s: seconds from now; None: the setting ``deadline_s``.
            notify: at most 64 KiB, delivered to the peer after the data is visible there. Must be
                None for a file, which cannot be notified.
            after: work of a GPU that must be done before local memory is touched: a
                ``torch.cuda.Event``, a ``torch.cuda.Stream`` (what is queued in it at the time of
                this call) or a CUevent's handle. The event may be recorded again, or dropped, when
                the call returns; the deadline includes the wait. None: there is nothing to wait
                for.
            checksum: whether, once a part of the data has moved, the peer's process compares what
                its memory then holds with a 64-bit checksum (XXH3) of each range at this end. A
                difference fails the transfer with the cause ``checksum: ...``, which names the
                range at both ends. The data is not moved again, what has moved stays, and no
                notification is delivered. Memory that others change meanwhile differs, too. It
                costs a pass over the data at either end (a GPU's is copied to the host for it), and
                a round trip per part; parts do not overlap on a connection. Not for files. None:
                the engine's default.

        Returns:
            A ``Ticket``.

        Raises:
            InvalidArgument: a descriptor is not inside the registered regions of this engine, or
                is empty, or its target overlaps another's; the message names it. A refusal by the
                peer is the ticket's error, which names the descriptor, too; so is a disk error,
                which names the offset and has the bytes moved in ``num_bytes_done``.
        """
        return self._submit("write", peer, descriptors, notify, deadline_s, after, checksum)

    def read(
        self,
        peer: Peer,
        descriptors: Descriptors,
        *,
        deadline_s: float | None = None,
        notify: bytes | None = None,
        after: After = None,
        checksum: bool | None = None,
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
            after: as for ``write``.
            checksum: as for ``write``.

        Returns:
            A ``Ticket``.

        Raises:
            InvalidArgument: as for ``write``.
        """
        return self._submit("read", peer, descriptors, notify, deadline_s, after, checksum)

    def write_blocks(
        self,
        peer: Peer,
        local_addresses: Integers | Blocks,
        remote_addresses: Integers | Blocks,
        sizes: Integers | int | None = None,
        *,
        deadline_s: float | None = None,
        notify: bytes | None = None,
        after: After = None,
        checksum: bool | None = None,
    ) -> Ticket:
        """Write many blocks, given as arrays or by pool: ``write`` without a Python object each.

        Args:
            peer: from ``open``.
            local_addresses: ``[n]`` integers; or blocks of a pool, ``pool.blocks(ids)``.
            remote_addresses: ``[n]`` integers; or as many blocks of the peer's pool, with the same
                block size and as many planes.
            sizes: ``[n]`` integers, or one size in bytes for all; None for blocks of pools.
            deadline_s: seconds from now; None: the setting ``deadline_s``.
            notify: at most 64 KiB, delivered to the peer after the data is visible there.
            after: as for ``write``.
            checksum: as for ``write``.

        Returns:
            A ``Ticket``.

        Raises:
            InvalidArgument: as for ``write``, where block i, in plane p of pools, is
                ``descriptors[p * n + i]``; or an id is not in its pool, or is the target of two.
        """
        where: Where = (local_addresses, remote_addresses, sizes)
        if sizes is None:
            where = as_paged("write_blocks", *where)
        return self._submit("write_blocks", peer, where, notify, deadline_s, after, checksum)

    def read_blocks(
        self,
        peer: Peer,
        local_addresses: Integers | Blocks,
        remote_addresses: Integers | Blocks,
        sizes: Integers | int | None = None,
        *,
        deadline_s: float | None = None,
        notify: bytes | None = None,
        after: After = None,
        checksum: bool | None = None,
    ) -> Ticket:
        """Read many blocks, given as arrays or by pool: ``read`` without a Python object each.

        Args:
            peer: from ``open``.
            local_addresses: ``[n]`` integers; or blocks of a pool, ``pool.blocks(ids)``.
            remote_addresses: ``[n]`` integers; or as many blocks of the peer's pool, with the same
                block size and as many planes.
            sizes: ``[n]`` integers, or one size in bytes for all; None for blocks of pools.
            deadline_s: seconds from now; None: the setting ``deadline_s``.
            notify: at most 64 KiB, delivered to the peer after all the data has arrived here.
            after: as for ``write``.
            checksum: as for ``write``.

        Returns:
            A ``Ticket``.

        Raises:
            InvalidArgument: as for ``write``, where block i, in plane p of pools, is
                ``descriptors[p * n + i]``; or an id is not in its pool, or is the target of two.
        """
        where: Where = (local_addresses, remote_addresses, sizes)
        if sizes is None:
            where = as_paged("read_blocks", *where)
        return self._submit("read_blocks", peer, where, notify, deadline_s, after, checksum)

    def _submit(
        self,
        op: str,
        peer: Peer,
        where: Any,
        notify: bytes | None,
        deadline_s: float | None,
        after: After,
        checksum: bool | None,
    ) -> Ticket:
        is_ours = self._is_ours(peer)
        seconds = config.current().deadline_s if deadline_s is None else deadline_s
        verify = self._checksum if checksum is None else checksum
        # The host code looks at most arguments as they are: a short request takes 1 us so, and 5 us
        # from arrays. None: something is uncommon, or wrong, and nothing was done.
        if after is None and is_ours:
            submitted = peer._submit_plain(op, where, notify, seconds, verify)
            if submitted is not None:
                return Ticket(submitted, peer.transport)
        takes_rows = op in ("write", "read")
        if not takes_rows and len(where) == 3:
            where = as_paged(op, *where)  # refuses blocks of pools that come with sizes
        if not is_ours:
            self._check_peer(op, peer)
        if notify is not None:
            if not isinstance(notify, (bytes, bytearray, memoryview)):
                raise InvalidArgument(f"{op}: notify must be bytes, got {type(notify).__name__}")
            notify = bytes(notify)
        if checksum is not None:
            as_bool(op, "checksum", checksum)
        if deadline_s is not None:
            seconds = as_deadline(op, deadline_s)
        fence = None if after is None else as_fence(op, after)
        options = (notify, seconds, fence, verify)
        columns: tuple[np.ndarray, np.ndarray, np.ndarray | int]
        if takes_rows:
            columns = as_triples(op, "descriptors", where, ROW)
        elif len(where) == 3:
            columns = as_columns(op, *where)
        else:
            pool, ids, peer_pool, peer_ids = where
            submitted = self._engine.submit_paged(
                peer._peer, op, pool, ids, peer_pool, peer_ids, *options
            )
            return Ticket(submitted, peer.transport)
        local, remote, sizes = columns
        submitted = self._engine.submit(peer._peer, op, local, remote, sizes, *options)
        return Ticket(submitted, peer.transport)

    def _is_ours(self, peer: Peer) -> bool:
        """Whether it is an open peer of this engine, which is open, too."""
        is_ours = type(peer) is Peer and peer._engine is self._engine
        return is_ours and not peer.closed and not self._closed

    def _check_peer(self, op: str, peer: Peer) -> None:
        self._check_open(op)
        if not isinstance(peer, Peer) or peer._engine is not self._engine:
            raise InvalidArgument(
                f"{op}: peer must be a Peer that this engine opened, got {peer!r}"
            )
        if peer.closed:
            raise InvalidArgument(f"{op}: peer must be open, got the closed {peer.name}")

    def _check_open(self, op: str) -> None:
        if self._closed:
            raise InvalidArgument(f"{op}: the engine {self.name} is closed")
