"""A client of Redis, or a compatible server, by redis-py: bounded, with this package's errors."""

import os
import ssl
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlencode

from ..errors import Unavailable
from . import bounded_socket
from .bounded_socket import BoundedSocket
from .redis_connections import Command, RedisConnections, Run
from .url import MetadataUrl

# Whatever redis-py raises for a nonsensical answer.
NONSENSE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)

FILES = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile")  # options of a URL

Answer = TypeVar("Answer")


class RedisClient:
    """A client that connects on first use, and reconnects when the connection is lost.

    Thread-safe: threads that call at the same time use separate connections.

    Raises:
        Unavailable: redis-py is not installed.
    """

    def __init__(self, url: MetadataUrl):
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry

            from .redis_parser import Parser
        except ImportError as error:
            raise url.error(f"{error}: pip install 'mooncake-kernels[metadata]'") from None
        self._url = url
        self._errors = (redis.RedisError, *NONSENSE)
        self._reasons = (bounded_socket.TooLate, redis.ReadOnlyError)
        bounds = {
            "protocol": 2,
            "driver_info": None,  # omitted: it would take two more requests
            "retry": Retry(NoBackoff(), 0),
            "socket_connect_timeout": bounded_socket.TIMEOUT_S,
            "socket_timeout": bounded_socket.TIMEOUT_S,
            "redis_connect_func": _bound,
        }
        parser = {"parser_class": Parser}
        self._pool = (
            _sentinel_pool(url, bounds, parser) if url.sentinels else _pool(url, bounds | parser)
        )
        self._connections = RedisConnections(self._pool)

    def ask(self, question: Callable[[Run], Answer]) -> Answer:
        """Return what a function makes of replies.

        It is called with ``run(*commands)``, which sends commands together and returns their
        replies; a command that the server refuses has an exception as its reply.

        Raises:
            Unavailable: the server cannot be reached, or the function rejects its answer.
        """
        try:
            return question(self._connections.run)
        except self._errors as error:
            raise self._unavailable(error) from None

    def detach(
        self, parse: Callable[[list[Any]], Answer], *commands: Command
    ) -> tuple[int, Answer] | None:
        """Make a connection that the caller closes, see ``RedisConnections.detach``: return its
        descriptor, and what a function makes of the commands' replies.

        Raises:
            Unavailable: the server cannot be reached, refuses a command, or the function rejects
                its answer.
        """
        try:
            made = self._connections.detach(*commands)
            if made is None:
                return None
            fd, replies = made
            try:
                return fd, parse(accepted(replies))
            except BaseException:
                os.close(fd)
                raise
        except self._errors as error:
            raise self._unavailable(error) from None

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._connections.close()
        if self._url.sentinels:
            self._pool.sentinel_manager.close()

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
        if not isinstance(reason, self._reasons):
            reason = error
        return self._url.error(str(reason) or type(reason).__name__)


def accepted(replies: list[Any]) -> list[Any]:
    """Return replies; if any of them is an exception, raise the first one."""
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies


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
    return SentinelConnectionPool(
        url.parts.path[1:],
        Sentinel(url.sentinels, sentinel_kwargs=bounds),
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
