"""Keys and values in Redis. Conditions are Lua scripts, so they are atomic."""

import time
from collections.abc import Callable
from operator import itemgetter
from typing import Any

from ..errors import Unavailable
from .redis_client import RedisClient, pack
from .untrusted import MAX_VALUE_BYTES, Malformed
from .url import MetadataUrl

LIST_S = 30.0  # the list may have to scan many keys of other users
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
        # A longer value is returned with one byte too many, which reveals it.
        value = self._ask("GETRANGE", key, 0, MAX_VALUE_BYTES)
        if not isinstance(value, bytes):
            raise self._url.error("no value")
        if not value and not self._ask("EXISTS", key):  # an empty one reads like none
            return None
        return value

    def keys(self, prefix: str) -> list[str]:
        pattern = "".join(f"\\{c}" if c in "*?[]\\" else c for c in prefix) + "*"
        until = time.monotonic() + LIST_S
        found: set[str] = set()
        cursor = 0
        while True:
            cursor, keys = self._ask(
                "SCAN", cursor, "MATCH", pattern, "COUNT", 1000, parse=_as_page
            )
            found.update(key for key in keys if key.startswith(prefix))
            if cursor == 0:
                return sorted(found)
            if time.monotonic() > until or len(found) > MAX_KEYS:
                raise self._url.error("it has too many keys to be looked through")

    def create(self, key: str, value: bytes, ttl_ms: int) -> bool:
        return self._ask("SET", key, value, "NX", "PX", ttl_ms) == b"OK"

    def replace(self, key: str, expected: bytes, value: bytes, ttl_ms: int) -> bool:
        return self._ask("EVAL", REPLACE, 1, key, expected, value, ttl_ms) == 1

    def remove(self, key: str, expected: bytes) -> None:
        self._ask("EVAL", REMOVE, 1, key, expected)

    def close(self) -> None:
        self._client.close()

    def _ask(
        self, *command: bytes | str | int, parse: Callable[[list[Any]], Any] = itemgetter(0)
    ) -> Any:
        try:
            return self._client.ask([pack(*command)], parse)
        except Unavailable as error:
            if ": WRONGTYPE" in str(error):
                raise Malformed("it must be a string, got another type of Redis") from None
            raise


def _as_page(replies: list[Any]) -> tuple[int, list[str]]:
    ((cursor, keys),) = replies
    return int(cursor), [key.decode("ascii", "replace") for key in keys]
