"""The storage of our metadata server: keys and values with conditions and a time to live."""

import hashlib
import threading
import time
from typing import NamedTuple

MAX_KEYS = 65_536
MAX_BYTES = 256 << 20  # of all values together


class Value(NamedTuple):
    data: bytes
    expires: float  # on the monotonic clock


class Full(Exception):
    """No room for another value."""


class Values:
    """A dictionary whose entries expire. Thread-safe.

    A condition is HTTP's: If-None-Match's ``*``; If-Match's ``*``, or etag of the expected value.
    """

    def __init__(self) -> None:
        self._values: dict[str, Value] = {}
        self._num_bytes = 0
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes | None:
        with self._lock:
            return self._get(key)

    def keys(self, prefix: str) -> list[str]:
        with self._lock:
            self._forget_expired()
            return sorted(key for key in self._values if key.startswith(prefix))

    def put(self, key: str, data: bytes, ttl_s: float, match: str | None, absent: bool) -> bool:
        """Put a value if the conditions hold; return whether they do. May raise ``Full``."""
        with self._lock:
            held = self._get(key)
            if (absent and held is not None) or not _matches(held, match):
                return False
            if held is None:
                self._forget_expired()
            num_bytes = self._num_bytes + len(data) - len(held or b"")
            if num_bytes > MAX_BYTES or (held is None and len(self._values) >= MAX_KEYS):
                raise Full
            self._values[key] = Value(data, time.monotonic() + ttl_s)
            self._num_bytes = num_bytes
            return True

    def remove(self, key: str, match: str | None) -> bool | None:
        """Remove a key if the condition holds; return whether it did, None if there is no key."""
        with self._lock:
            held = self._get(key)
            if held is None:
                return None
            if not _matches(held, match):
                return False
            self._drop(key)
            return True

    def _get(self, key: str) -> bytes | None:
        value = self._values.get(key)
        if value is not None and value.expires <= time.monotonic():
            self._drop(key)
            return None
        return value.data if value is not None else None

    def _drop(self, key: str) -> None:
        self._num_bytes -= len(self._values.pop(key).data)

    def _forget_expired(self) -> None:
        for key in list(self._values):
            self._get(key)


def etag(value: bytes) -> str:
    """The value's name in a condition; client and server compute the same."""
    return f'"{hashlib.sha256(value).hexdigest()}"'


def _matches(held: bytes | None, match: str | None) -> bool:
    return match is None or (held is not None and match in ("*", etag(held)))
