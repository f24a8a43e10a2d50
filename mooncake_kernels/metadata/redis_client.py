"""A client of Redis, or a compatible server: bounded, with this package's errors.

redis-py makes connections, logs in, chooses their database and finds the master behind sentinels.
The connections are kept here while they are idle, and replies are read here: redis-py's pool keeps
statistics whenever a connection is taken out and put back, its parser in Python is slower, and that
of hiredis reserves memory for as many elements as a reply claims to have, and returns it while no
other thread can run, which takes 1.7 s for 1e9 of them.
"""

import contextlib
import os
import select
import ssl
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import urlencode

from ..errors import Unavailable
from . import bounded_socket
from .bounded_socket import BoundedSocket, TooLate
from .url import MetadataUrl

# Whatever a connection, or a function that parses replies, raises for a nonsensical answer.
NONSENSE = (OSError, EOFError, ValueError, TypeError, LookupError, AttributeError, RecursionError)

FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")  # options of a URL
READ_BYTES = 64 << 10  # at once
MAX_DEPTH = 16  # of arrays in arrays
CLOSED = "Connection closed by server."

Answer = TypeVar("Answer")


class RedisClient:
    """A client that connects on first use, and reconnects when the connection is lost.

    Thread-safe: threads that call at the same time use separate connections. A forked child uses
    none of its parent's.

    Raises:
        Unavailable: redis-py is not installed.
    """

    def __init__(self, url: MetadataUrl):
        try:
            import redis
            from redis._parsers import _RESP2Parser
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise url.error(f"{error}: pip install 'mooncake-kernels[metadata]'") from None
        self._url = url
        self._errors = (redis.RedisError, *NONSENSE)
        self._unknown_script = redis.exceptions.NoScriptError
        bounds = {
            "protocol": 2,
            "driver_info": None,  # omitted: it would take two more requests
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": bounded_socket.TIMEOUT_S,
            "socket_timeout": bounded_socket.TIMEOUT_S,
            "redis_connect_func": _bound,
        }
        parser = {"parser_class": _RESP2Parser}  # not hiredis's: it would trust a reply's sizes
        self._pool = (
            _sentinel_pool(url, bounds, parser) if url.sentinels else _pool(url, bounds | parser)
        )
        self._idle: list[RedisConnection] = []

    def ask(
        self,
        commands: Sequence[bytes],
        parse: Callable[..., Answer],
        *arguments: Any,
        script: str | None = None,
    ) -> Answer:
        """Send commands together, and return what a function makes of their replies.

        Nothing is sent twice, except to a server that does not know a script. A connection that
        fails midway is not used again, and the rest of its replies is discarded. Nor is one to a
        server that no longer accepts commands.

        Args:
            commands: in wire form, see ``pack``.
            parse: that function.
            *arguments: of it, after the replies.
            script: that the commands run by its hash: if the server does not know it, as after a
                restart, it is loaded, and they are sent again.

        Raises:
            Unavailable: the server cannot be reached, refuses a command, or the function rejects
                its answer.
        """
        try:
            connection = self._take()
            try:
                replies = connection.converse(commands)
            except BaseException:
                self._drop(connection)
                raise
            self._idle.append(connection)
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply
            return parse(replies, *arguments)
        except self._errors as error:
            if script is None or not isinstance(error, self._unknown_script):
                raise self._unavailable(error) from None
        load = pack("SCRIPT", "LOAD", script)
        return self.ask([load, *commands], lambda replies: parse(replies[1:], *arguments))

    def detach(
        self, commands: Sequence[bytes], parse: Callable[[list[Any]], Answer]
    ) -> tuple[int, Answer] | None:
        """Make a connection, run commands on it as ``ask`` does, and give it away.

        Returns:
            Its descriptor, which the caller closes, and what a function makes of the replies. None:
            it would be encrypted.

        Raises:
            Unavailable: as in ``ask``.
        """
        try:
            connection = RedisConnection(self._pool.get_connection())
            try:
                replies = connection.converse(commands)
                for reply in replies:
                    if isinstance(reply, Exception):
                        raise reply
                answer = parse(replies)
                fd = connection.detach()
            finally:
                self._drop(connection)
        except self._errors as error:
            raise self._unavailable(error) from None
        return None if fd is None else (fd, answer)

    def close(self) -> None:
        """Disconnect all, even those in use. Idempotent."""
        self._pool.disconnect()
        while self._idle:
            with contextlib.suppress(IndexError):  # taken by another thread
                self._drop(self._idle.pop())
        if self._url.sentinels:
            self._pool.sentinel_manager.close()

    def _take(self) -> "RedisConnection":
        """A connection of this process's to the current master, with nothing to read."""
        while self._idle:
            try:
                connection = self._idle.pop()
            except IndexError:  # taken by another thread
                break
            if (
                connection.made.pid == os.getpid()
                and self._pool.owns_connection(connection.made)
                and connection.is_clean
                and connection.is_quiet()
            ):
                return connection
            self._drop(connection)
        return RedisConnection(self._pool.get_connection())

    def _drop(self, connection: "RedisConnection") -> None:
        connection.made.disconnect()
        self._pool.release(connection.made)  # reconnects it when one is needed

    def _unavailable(self, error: Exception) -> Unavailable:
        """The error to raise. redis-py blames the connection for files that it cannot use."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority, certificate, key = map(self._url.options.get, FILES)
        try:
            if authority:
                context.load_verify_locations(authority)
        except OSError as wrong:
            return self._url.error(f"ssl_ca_certs={authority}: {wrong}")
        try:
            if certificate:
                context.load_cert_chain(
                    certificate, key, password=lambda: ""
                )  # no question to the user
        except OSError as wrong:
            return self._url.error(f"ssl_certfile={certificate}, ssl_keyfile={key}: {wrong}")
        reason = error.__context__  # which redis-py may replace with an error that says less
        if not isinstance(reason, TooLate):
            reason = error
        return self._url.error(str(reason) or type(reason).__name__)


class RedisConnection:
    """A connection that redis-py has made and logged in, used by one thread at a time. Its replies
    are as bounded as those of a ``BoundedSocket``, which redis-py has used.

    Attributes:
        made: redis-py's.
        is_clean: nothing had arrived beyond the last reply.
    """

    def __init__(self, made: Any):
        self.made = made
        self.is_clean = True
        self._socket = made._sock.connected  # of a BoundedSocket
        self._input = select.poll()
        self._input.register(self._socket, select.POLLIN)

    def converse(self, commands: Sequence[bytes]) -> list[Any]:
        """Send commands together, and return their replies: bytes, int, None or a list of them; or
        an exception for a command that the server refuses.

        Raises:
            Exception: the connection is of no more use.
        """
        self._socket.settimeout(bounded_socket.TIMEOUT_S)
        try:
            self._socket.sendall(b"".join(commands))
        except OSError as error:
            raise ConnectionError(f"Error while writing to socket. {error}") from None
        until = time.monotonic() + bounded_socket.TIMEOUT_S
        arrived, at = bytearray(), 0
        replies: list[Any] = []
        array, num_missing = replies, len(commands)
        outer: list[tuple[list[Any], int]] = []  # arrays around this one
        while num_missing or outer:
            if not num_missing:
                array, num_missing = outer.pop()
                continue
            num_missing -= 1
            looked = at
            while (end := arrived.find(b"\n", looked)) < 0:
                looked = len(arrived)
                self._receive(arrived, until)
            line, at = bytes(arrived[at:end]), end + 1
            kind, rest = line[:1], line[1:-1]
            if line[-1:] != b"\r":
                raise ValueError(f"Protocol Error: {line!r}")
            if kind == b":":
                array.append(int(rest))
            elif kind == b"+":
                array.append(rest)
            elif kind == b"-":
                array.append(_refusal(rest))
            elif kind not in (b"$", b"*") or (size := int(rest)) < -1 or len(outer) > MAX_DEPTH:
                raise ValueError(f"Protocol Error: {line!r}")
            elif size == -1:
                array.append(None)
            elif kind == b"*":
                outer.append((array, num_missing))
                array.append([])
                array, num_missing = array[-1], size
            else:
                while len(arrived) - at < size + 2:
                    self._receive(arrived, until)
                array.append(bytes(arrived[at : at + size]))
                at += size + 2
        self.is_clean = at == len(arrived)
        return replies

    def is_quiet(self) -> bool:
        """Whether there is nothing to read, not even the end or an error. False if closed.

        If it is False, some of the input may be gone.
        """
        is_tls = isinstance(self._socket, ssl.SSLSocket)
        if self._socket.fileno() < 0 or (is_tls and self._socket.pending()):
            return False  # TLS may have read ahead
        if not self._input.poll(0):
            return True
        self._socket.settimeout(0)
        try:
            self._socket.recv(1)
        except ssl.SSLWantReadError:  # it was for TLS alone, as a ticket for a later session is
            return True
        except OSError:
            pass
        return False

    def detach(self) -> int | None:
        """Give up the connection, and return its descriptor; None: it is encrypted, and is kept."""
        return None if isinstance(self._socket, ssl.SSLSocket) else self._socket.detach()

    def _receive(self, arrived: bytearray, until: float) -> None:
        """Receive some more.

        Raises:
            EOFError: there is no more.
            TooLate: there is none until then.
            OSError: it is too much, or the connection has failed.
        """
        left = until - time.monotonic()
        try:
            if left <= 0:
                raise TimeoutError
            self._socket.settimeout(left)
            more = self._socket.recv(READ_BYTES)
        except TimeoutError:
            raise bounded_socket.too_late() from None
        except OSError as error:
            host = self.made._host_error()
            raise ConnectionError(f"Error while reading from {host} : {error.args}") from None
        if not more:
            raise EOFError(CLOSED)
        arrived += more
        if len(arrived) > bounded_socket.MAX_BYTES:
            raise bounded_socket.too_much()


def pack(*words: bytes | str | int, num_more: int = 0) -> bytes:
    """A command in wire form; its first words, if more follow."""
    packed = [b"*%d\r\n" % (len(words) + num_more)]
    for word in words:
        string = word if isinstance(word, bytes) else str(word).encode()
        packed.append(b"$%d\r\n%b\r\n" % (len(string), string))
    return b"".join(packed)


def _refusal(words: bytes) -> Exception:
    """The exception for an error of the server.

    Raises:
        Exception: it is about more than one command: the server is a replica, or not ready.
    """
    import redis
    from redis._parsers import _RESP2Parser

    error: Exception = _RESP2Parser.parse_error(words.decode("utf-8", errors="replace"))
    is_of_script = " -READONLY " in str(error)  # Redis 6
    if is_of_script or isinstance(error, redis.ConnectionError | redis.ReadOnlyError):
        raise error
    return error


def _pool(url: MetadataUrl, bounds: dict[str, Any]) -> Any:
    """Connections to the server of a URL."""
    from redis import ConnectionPool

    parts = url.parts
    whole = f"{parts.scheme}://{parts.netloc}{parts.path}?{urlencode(url.options)}"
    return ConnectionPool.from_url(whole, **bounds)


def _sentinel_pool(url: MetadataUrl, bounds: dict[str, Any], parser: dict[str, Any]) -> Any:
    """Connections to the current master of a service; each asks the sentinels for it."""
    from redis.sentinel import Sentinel, SentinelConnectionPool

    user, password = url.login
    sentinel = Sentinel(url.sentinels, sentinel_kwargs=bounds)
    for server in sentinel.sentinels:  # not hiredis's there either, which redis-py would choose
        server.connection_pool.connection_kwargs |= parser
    return SentinelConnectionPool(
        url.parts.path[1:],
        sentinel,
        db=int(url.options.get("db") or 0),
        username=user or None,
        password=password or None,
        **bounds,
        **parser,
    )


def _bound(connection: Any) -> None:
    connection._sock = BoundedSocket(connection._sock)
    try:
        connection.on_connect()
    except BaseException:  # or it would count as logged in, with its database chosen
        connection.disconnect()
        raise
