"""What a server must be able to do (``Store``), and what is made of it (``Metadata``)."""

from collections.abc import Callable
from typing import Any, Protocol

from .._closing import Closing
from .entry import Entry


class Store(Protocol):
    """Keys and values on a server; a key may go by itself when its time is over.

    Thread-safe. No call takes longer than a few times ``bounded_socket.TIMEOUT_S``. Each raises
    ``Unavailable`` if the server cannot be reached, or answers what it should not.
    """

    def get(self, key: str) -> bytes | None:
        """Return what is under the key, None if nothing."""

    def keys(self, prefix: str) -> list[str]:
        """Return the keys that begin so."""

    def create(self, key: str, value: bytes, ttl_s: float) -> bool:
        """Put a value under a key that there is not; return whether there was none."""

    def replace(self, key: str, expected: bytes, value: bytes, ttl_s: float) -> bool:
        """Put a value in the place of the expected one; return whether that was there."""

    def remove(self, key: str, expected: bytes) -> None:
        """Remove the key if the expected value is under it."""

    def close(self) -> None:
        """Disconnect."""


def milliseconds(ttl_s: float) -> int:
    """A time to live as servers take it."""
    return max(1, round(ttl_s * 1000))


class Publication(Protocol):
    """An engine that can be found by its name, until this is closed."""

    def close(self) -> None:
        """Take the name back. Idempotent."""


class Metadata(Closing):
    """Which engines there are, and where; a context manager.

    Attributes:
        url: of the server, without secrets.
    """

    url: str

    def check_name(self, op: str, name: Any) -> str:
        """Return the name if an engine may be called so; raise ``InvalidArgument`` if not."""
        raise NotImplementedError

    def lookup(self, name: str) -> Entry | None:
        """Return the engine of that name, None if there is none."""
        raise NotImplementedError

    def entries(self) -> list[Entry]:
        """Return all engines, by name."""
        raise NotImplementedError

    def publish(self, entry: Entry, is_gone: Callable[[Entry], bool]) -> Publication:
        """Let the engine be found; ``is_gone`` says whether who has the name is gone for sure."""
        raise NotImplementedError

    def close(self) -> None:
        """Disconnect. Idempotent."""
