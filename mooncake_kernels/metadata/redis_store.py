"""Redis, or what speaks its protocol, by redis-py. Conditions are Lua scripts: they are atomic."""

import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from . import bounded_socket
from .base import milliseconds
from .bounded_socket import BoundedSocket
from .untrusted import MAX_VALUE_BYTES, Malformed
from .url import MetadataUrl

LIST_S = 30.0  # a server may hold many keys of others, among which ours are looked for
MAX_KEYS = 1_000_000

REPLACE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
return 1
"""
REMOVE = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""
# Whatever redis-py makes of an answer that makes no sense.
NONSENSE = (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError)


class RedisStore:
    """A ``Store`` in Redis. Keeps a connection, which redis-py makes anew when it is lost."""

    def __init__(self, url: MetadataUrl):
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise url.error(f"{error}: pip install 'mooncake-kernels[metadata]'") from None
        self._url, parts = url, url.parts
        self._errors = (redis.RedisError, *NONSENSE)
        self._pool = redis.ConnectionPool.from_url(
            f"{parts.scheme}://{parts.netloc}{parts.path}?{urlencode(url.options)}",
            protocol=2,
            driver_info=None,  # not said: it would take two more requests
            retry=Retry(NoBackoff(), 0),
            socket_connect_timeout=bounded_socket.TIMEOUT_S,
            socket_timeout=bounded_socket.TIMEOUT_S,
            redis_connect_func=_bound,
        )
        self._redis = redis.Redis(connection_pool=self._pool)

    def get(self, key: str) -> bytes | None:
        # Of a longer value one byte too many comes, by which it is known.
        value = self._ask(lambda: self._redis.getrange(key, 0, MAX_VALUE_BYTES))
        if not isinstance(value, bytes):
            raise self._url.error("no value")
        return value or None

    def keys(self, prefix: str) -> list[str]:
        pattern = "".join(f"\\{c}" if c in "*?[]\\" else c for c in prefix) + "*"
        until = time.monotonic() + LIST_S
        found: set[str] = set()
        cursor = 0
        while True:
            cursor, keys = self._scan(cursor, pattern)
            found.update(key for key in keys if key.startswith(prefix))
            if cursor == 0:
                return sorted(found)
            if time.monotonic() > until or len(found) > MAX_KEYS:
                raise self._url.error("it has too many keys to be looked through")

    def create(self, key: str, value: bytes, ttl_s: float) -> bool:
        return bool(self._ask(lambda: self._redis.set(key, value, nx=True, px=milliseconds(ttl_s))))

    def replace(self, key: str, expected: bytes, value: bytes, ttl_s: float) -> bool:
        arguments = (1, key, expected, value, milliseconds(ttl_s))
        return self._ask(lambda: self._redis.eval(REPLACE, *arguments)) == 1

    def remove(self, key: str, expected: bytes) -> None:
        self._ask(lambda: self._redis.eval(REMOVE, 1, key, expected))

    def close(self) -> None:
        self._redis.close()
        self._pool.disconnect()

    def _scan(self, cursor: int, pattern: str) -> tuple[int, list[str]]:
        def scan() -> tuple[int, list[str]]:
            answer: Any = self._redis.scan(cursor, match=pattern, count=1000)
            return int(answer[0]), [key.decode("ascii", "replace") for key in answer[1]]

        return self._ask(scan)

    def _ask(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except self._errors as error:
            words = str(error) or type(error).__name__
            if words.startswith("WRONGTYPE"):
                raise Malformed("it must be a string, got another type of Redis") from None
            raise self._url.error(words) from None


def _bound(connection: Any) -> None:
    connection._sock = BoundedSocket(connection._sock)
    try:
        connection.on_connect()
    except BaseException:  # or it would be taken for one that has logged in and chosen its database
        connection.disconnect()
        raise
