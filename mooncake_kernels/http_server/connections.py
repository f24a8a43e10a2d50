"""Connections of an HTTP server: how many there may be, and how long each may keep it waiting.

uvicorn has no deadline for the arrival of a request, and counts connections only to refuse all that
come later. Here a connection serves one request, has a deadline for each of its phases, and one
that keeps the server waiting is dropped for a newer one.
"""

import asyncio
import ipaddress
from collections import Counter
from dataclasses import dataclass
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

STATE = "mooncake_kernels.connection"  # in the ``state`` of an ASGI scope


@dataclass(frozen=True)
class Limits:
    """What strangers may use of a server.

    Attributes:
        connections: at a time. One more, and the oldest one that keeps the server waiting is closed
            of the address that has most of these.
        per_address: of them, of one address; of IPv6, of one network of 64 bits.
        headers_s: seconds from the connection until the headers have arrived.
        body_s: seconds from the headers until the body has arrived.
        answer_s: seconds from the beginning of the answer until the client has read it.
        body_bytes: of one request's body.
        held_bytes: of all requests under way.
        held_per_address: of them, of one address.
    """

    connections: int = 256
    per_address: int = 64
    headers_s: float = 3.0
    body_s: float = 10.0
    answer_s: float = 10.0
    body_bytes: int = 64 << 10
    held_bytes: int = 256 << 20
    held_per_address: int = 64 << 20


class Admission:
    """The connections of a server. Used by its event loop only."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self._all: Counter[str] = Counter()
        self._waiting: dict[str, dict[Connection, None]] = {}  # by address, the oldest first
        self._held: Counter[str] = Counter()

    def enter(self, connection: "Connection") -> None:
        """Admit a connection, which may cost another one, or itself."""
        address = connection.address
        self._all[address] += 1
        self.wait(connection)
        if self._all[address] > self.limits.per_address:
            self._drop_one_of(address)
        elif self._all.total() > self.limits.connections:
            self._drop_one_of(max(self._waiting, key=lambda one: len(self._waiting[one])))

    def leave(self, connection: "Connection") -> None:
        """Forget a connection that is closed."""
        self.work(connection)
        self._subtract(self._all, connection.address, 1)
        self._subtract(self._held, connection.address, connection.held_bytes)

    def wait(self, connection: "Connection") -> None:
        """Note that the connection keeps the server waiting."""
        self._waiting.setdefault(connection.address, {})[connection] = None

    def work(self, connection: "Connection") -> None:
        """Note that it no longer does."""
        waiting = self._waiting.get(connection.address, {})
        waiting.pop(connection, None)
        if not waiting:
            self._waiting.pop(connection.address, None)

    def hold(self, connection: "Connection", num_bytes: int) -> bool:
        """Reserve memory until the connection is closed; return whether there is that much."""
        if (
            self._held.total() + num_bytes > self.limits.held_bytes
            or self._held[connection.address] + num_bytes > self.limits.held_per_address
        ):
            return False
        self._held[connection.address] += num_bytes
        connection.held_bytes += num_bytes
        return True

    def _drop_one_of(self, address: str) -> None:
        oldest = next(iter(self._waiting[address]))
        self.work(oldest)  # its end is not noted at once
        oldest.abort()

    @staticmethod
    def _subtract(counter: "Counter[str]", address: str, number: int) -> None:
        counter[address] -= number
        if counter[address] <= 0:
            del counter[address]


class Connection(asyncio.Protocol):
    """One connection, whose bytes uvicorn's protocol handles.

    Args:
        admission: of the server.
        config, server_state, app_state, _loop: what uvicorn gives its protocols.
    """

    def __init__(
        self,
        admission: Admission,
        config: Any,
        server_state: Any,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ):
        self._admission, self._limits = admission, admission.limits
        self._inner = H11Protocol(config, server_state, {**app_state, STATE: self}, _loop)
        self._loop = _loop or asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_lost = False
        self.address = ""
        self.held_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.address = _network(transport.get_extra_info("peername"))
        self._inner.connection_made(transport)
        self._wait(self._limits.headers_s)
        self._admission.enter(self)

    def data_received(self, data: bytes) -> None:
        self._inner.data_received(data)

    def eof_received(self) -> bool:
        self._inner.eof_received()
        # Who has sent a whole request may still read; half of one is worth nothing.
        return self._inner.conn.their_state in (h11.DONE, h11.MUST_CLOSE)

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        self._is_lost = True
        self._stop_timer()
        self._admission.leave(self)
        self._inner.connection_lost(error)

    def abort(self) -> None:
        """Close the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def headers_arrived(self, *, has_body: bool) -> None:
        """Note that the request has begun."""
        if has_body:
            self._wait(self._limits.body_s)
        else:
            self.body_arrived()

    def body_arrived(self) -> None:
        """Note that the request is there: now the client waits."""
        self._stop_timer()
        self._admission.work(self)

    def answer_begins(self) -> None:
        """Note that the answer is being sent: the client may take its time."""
        if not self._is_lost:
            self._wait(self._limits.answer_s)
            self._admission.wait(self)

    def hold(self, num_bytes: int) -> bool:
        """See ``Admission.hold``."""
        return not self._is_lost and self._admission.hold(self, num_bytes)

    def _wait(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self.abort)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _network(peer: Any) -> str:
    """Whom the connections of an address are counted for."""
    if not isinstance(peer, tuple):
        return ""  # of a Unix socket
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, 64), strict=False))
