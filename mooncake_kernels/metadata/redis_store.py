"""Keys and values in Redis. Conditions are Lua scripts: they are atomic."""

import time
from collections.abc import Callable
from typing import Any

from ..errors import Unavailable
from .base import milliseconds
from .redis_client import Answer, RedisClient
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


class RedisStore:
    """A ``Store`` in Redis."""

    def __init__(self, url: MetadataUrl):
        self._url = url
        self._client = RedisClient(url)

    def get(self, key: str) -> bytes | None:
        # Of a longer value one byte too many comes, by which it is known.
        value = self._ask(lambda redis: redis.getrange(key, 0, MAX_VALUE_BYTES))
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
        px = milliseconds(ttl_s)
        return bool(self._ask(lambda redis: redis.set(key, value, nx=True, px=px)))

    def replace(self, key: str, expected: bytes, value: bytes, ttl_s: float) -> bool:
        arguments = (1, key, expected, value, milliseconds(ttl_s))
        return self._ask(lambda redis: redis.eval(REPLACE, *arguments)) == 1

    def remove(self, key: str, expected: bytes) -> None:
        self._ask(lambda redis: redis.eval(REMOVE, 1, key, expected))

    def close(self) -> None:
        self._client.close()

    def _ask(self, question: Callable[[Any], Answer]) -> Answer:
        try:
            return self._client.ask(question)
        except Unavailable as error:
            if ": WRONGTYPE" in str(error):
                raise Malformed("it must be a string, got another type of Redis") from None
            raise

    def _scan(self, cursor: int, pattern: str) -> tuple[int, list[str]]:
        return self._ask(lambda redis: _as_page(redis.scan(cursor, match=pattern, count=1000)))


def _as_page(answer: tuple[int, list[bytes]]) -> tuple[int, list[str]]:
    return int(answer[0]), [key.decode("ascii", "replace") for key in answer[1]]
