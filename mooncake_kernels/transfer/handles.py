"""The objects a ``TransferEngine`` returns: regions, peers and tickets."""

import asyncio
from collections.abc import Generator
from typing import Any, Literal

from .. import _host
from .._arguments import as_seconds
from ..buffers import Buffer
from ..closeable import Closeable
from ..errors import InvalidArgument, TransferError
from . import log
from .arguments import as_deadline
from .completions import completion

Access = Literal["read_write", "read", "write", "windows"]

ACCESS: dict[Access, tuple[bool, bool]] = {
    "read_write": (True, True),
    "read": (True, False),
    "write": (False, True),
    "windows": (False, False),
}


class Region(Closeable):
    """Registered memory: what ``TransferEngine.register`` returns.

    The engine keeps the memory alive until the region or the engine is closed, even if this object
    is dropped.

    Attributes:
        address: where it starts; pass it to peers.
        num_bytes: its size.
        location: ``cpu:0``, or ``cuda:1`` for GPU memory, by this process's ordinals.
        access: what peers may do with it: ``read_write``, ``read`` or ``write``; ``windows``: read
            what windows are open on.
        note: why NICs of the engine cannot use it, all or ``not on mlx5_1``; empty if all can, or
            if there are none.
    """

    def __init__(
        self, engine: _host.TransferEngine, siblings: set["Region"], buffer: Buffer, access: Access
    ):
        self.address = buffer.address
        self.num_bytes = buffer.num_bytes
        self.location = buffer.location
        self.access = access
        self._buffer: Buffer | None = buffer
        self._engine = engine
        self._siblings = siblings
        remote_read, remote_write = ACCESS[access]
        kind, _, ordinal = buffer.location.partition(":")
        self._region = _host.TransferRegion()
        siblings.add(self)  # holds the memory from before the engine uses it
        try:
            engine.add_region(
                self._region,
                buffer.address,
                buffer.num_bytes,
                buffer.writable,
                remote_read,
                remote_write,
                access == "windows",
                int(ordinal) if kind == "cuda" else -1,
            )
            self.note: str = self._region.note
        except BaseException:  # a signal's handler may have raised it, after the registration
            self.close()
            raise

    def __repr__(self) -> str:
        where = f"{self.address:#x} + {self.num_bytes} bytes on {self.location}"
        return f"Region({where}, {self.access})"

    def window(self, address: int, num_bytes: int) -> "Window":
        """Let peers read a part of this region, which is registered with access ``windows``.

        Args:
            address: where the part begins.
            num_bytes: its size.

        Returns:
            A ``Window``; peers may read it until it is closed.

        Raises:
            InvalidArgument: it is empty or not inside the region, or the region has another access
                or is closed.
        """
        return Window(self._engine, self._region, address, num_bytes)

    def close(self) -> None:
        """Deregister the memory: after this no thread of the engine touches it.

        Transfers that are using it end now: those of this engine fail with a ``TransferError``; the
        connections of peers that are writing or reading here are closed. Queued requests fail
        when their turn comes. Idempotent.

        Raises:
            TimeoutError: a peer on this machine is copying into or out of it and makes no progress,
                because its process was stopped. No new transfer uses the region; close it again
                before you free its memory.
        """
        if not self._engine.remove_region(self._region):
            raise TimeoutError("close: a peer on this machine, which is stopped, uses the region")
        self._siblings.discard(self)
        self._buffer = None


class Window(Closeable):
    """A part of a region that peers may read: what ``Region.window`` returns."""

    __slots__ = ("_engine", "_window")

    def __init__(
        self,
        engine: _host.TransferEngine,
        region: _host.TransferRegion,
        address: int,
        num_bytes: int,
    ):
        self._engine = engine
        self._window = _host.TransferRegion()
        engine.open_window(self._window, region, address, num_bytes)

    def close(self) -> None:
        """End it, unless another window on the same bytes is open. Idempotent.

        Peers that are reading it by a connection, or in this process, fail first. NICs know only
        whole regions: a peer that had a window may read the region by ``rdma`` until that is
        closed. A process of this user on this machine could access the memory anyway, and is not
        waited for.
        """
        self._engine.close_window(self._window)


class Peer(Closeable):
    """Another engine, or a file: what ``TransferEngine.open`` returns.

    It stays open, with its threads and connections, until it or the engine is closed, even if this
    object is dropped: dropping it does not cancel its transfers.

    It has as many connections and threads as the setting ``transfer_lanes`` says, over ``local``
    and ``rdma`` one; over tcp up to three more for small requests of several threads, if that
    setting is not 1. All but the first exist only when there is work for them. A large request is
    moved by several at once, and threads do not wait for each other, so requests overlap: to order
    one after another, wait for the other's ticket or notification.

    Attributes:
        name: the name it was opened by.
        transport: how its data moves: ``local``, ``shm``, ``cuda_ipc``, ``rdma``, ``tcp`` or
            ``file``.
        closed: whether ``close`` was called.
    """

    def __init__(self, engine: _host.TransferEngine, peer: _host.TransferPeer):
        self.name = peer.name
        self.transport = peer.transport
        self.closed = False
        self._engine = engine
        self._peer = peer
        self._submit_plain = engine.plain_requests(peer)

    def __repr__(self) -> str:
        return f"Peer({self.name} by {self.transport}{', closed' if self.closed else ''})"

    def sync(self, *, deadline_s: float | None = None) -> "Ticket":
        """Make what was written to a file survive a loss of power (``fdatasync(2)``).

        Equivalent to waiting for all transfers requested before it, and then::

            os.fdatasync(file)

        A write's own ticket guarantees less: that the bytes are on the disk or in the page cache,
        where every process of this machine sees them, even if this one is killed.

        Args:
            deadline_s: seconds from now; None: the setting ``deadline_s``.

        Returns:
            A ``Ticket``, of 0 bytes. Its error is the disk's; errors of transfers are on their own
            tickets.

        Raises:
            InvalidArgument: the peer is an engine, or is closed.
        """
        if self.closed:
            raise InvalidArgument(f"sync: peer must be open, got the closed {self.name}")
        ticket = self._engine.sync(self._peer, as_deadline("sync", deadline_s))
        return Ticket(ticket, self.transport)

    def close(self) -> None:
        """Fail pending requests ("the peer was closed") and disconnect. Idempotent."""
        self.closed = True
        self._engine.close_peer(self._peer)


class Ticket:
    """A transfer in flight: what ``write`` and ``read`` return. Awaitable.

    Dropping a ticket does not cancel its transfer.
    """

    __slots__ = ("__weakref__", "_ticket", "_transport")

    def __init__(self, submitted: _host.TransferTicket | int, transport: str = ""):
        self._ticket = submitted  # an integer: the number of bytes, already delivered
        self._transport = transport  # for the log

    def __repr__(self) -> str:
        return f"Ticket({self.num_bytes} bytes, {'over' if self.done else 'under way'})"

    @property
    def num_bytes(self) -> int:
        """Payload bytes of the whole request."""
        return self._ticket if isinstance(self._ticket, int) else self._ticket.num_bytes

    @property
    def done(self) -> bool:
        """Whether it has ended: delivered, failed, cancelled or past its deadline. Never blocks."""
        return isinstance(self._ticket, int) or self._ticket.finished()

    @property
    def ended_s(self) -> float | None:
        """When it ended, on the clock of ``time.monotonic()``, however late that is noticed.

        None while it is under way, and for a request that was over when its call returned.
        """
        return None if isinstance(self._ticket, int) else self._ticket.ended_s

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all of it is delivered: a write is visible at the peer, a read is here.

        Args:
            timeout_s: how long to wait, in seconds; None: until the transfer's own deadline.

        Raises:
            TransferError: it failed, was cancelled, or its deadline passed. Local memory is no
                longer touched.
            TimeoutError: ``timeout_s`` passed; the transfer continues.
        """
        if timeout_s is not None:
            timeout_s = as_seconds("wait", "timeout_s", timeout_s, minimum=0.0)
        if isinstance(self._ticket, int):
            return
        try:
            finished = self._ticket.wait(timeout_s)
        except TransferError as error:
            log.failed(self._transport, error)
            raise
        if not finished:
            raise TimeoutError(f"wait: the transfer is still under way after {timeout_s} s")

    def cancel(self) -> bool:
        """End the transfer; when this returns, local memory is no longer touched.

        The peer may still write what it has received so far to its own memory, but no later than
        the start of the next request of this ``Peer``.

        Returns:
            Whether it was cancelled, by this call or an earlier one; False if it had ended before.
        """
        return not isinstance(self._ticket, int) and self._ticket.cancel()

    def __await__(self) -> Generator[Any, None, None]:
        """Wait in asyncio, like ``wait()``. Cancelling the wait cancels the transfer.

        An event loop uses one file descriptor for all the tickets awaited in it.
        """
        return self._completion().__await__()

    async def _completion(self) -> None:
        if isinstance(self._ticket, int):
            return await asyncio.sleep(0)  # a loop over short transfers lets other tasks run
        try:
            with completion(self._ticket) as finished:
                await asyncio.wait([finished], timeout=max(0.0, self._ticket.remaining_s))
        except InvalidArgument:  # a forked child: the parent owns the transfer
            raise
        except BaseException:  # the wait was abandoned, for whatever reason
            self.cancel()
            raise
        self._ticket.wait(None)  # finished, or overdue: this does not block
