"""The interface of a server (``Store``), and the directory built on it (``Metadata``)."""

from collections.abc import Callable
from typing import Any, Protocol

from ..closeable import Closeable
from .entry import Entry


class Store(Protocol):
    """Keys and values on a server; a key may expire, after milliseconds.

    Thread-safe. No call but ``keys`` takes longer than a few times ``bounded_socket.TIMEOUT_S``.
    Each raises ``Unavailable`` if the server cannot be reached, or gives an invalid answer.
    """

    def get(self, key: str) -> bytes | None:
        """Return the value of the key, None if there is none."""

    def keys(self, prefix: str) -> list[str]:
        """Return the keys with this prefix."""

    def create(self, key: str, value: bytes, ttl_ms: int) -> bool:
        """Set a key that does not exist; return whether it did not."""

    def replace(self, key: str, expected: bytes, value: bytes, ttl_ms: int) -> bool:
        """Replace the expected value; return whether it was there."""

    def remove(self, key: str, expected: bytes) -> None:
        """Remove the key if it has the expected value."""

    def close(self) -> None:
        """Disconnect."""


class Publication(Protocol):
    """An engine that can be found by name, until this is closed."""

    def close(self) -> None:
        """Withdraw the name. Idempotent."""


class Metadata(Closeable):
    """A directory of engines; a context manager.

    Attributes:
        url: of the server, without secrets.
    """

    url: str

    def check_name(self, op: str, name: Any) -> str:
        """Return the name if it is valid for an engine; raise ``InvalidArgument`` if not."""
        raise NotImplementedError

    def lookup(self, name: str) -> Entry | None:
        """Return the engine with that name, None if there is none."""
        raise NotImplementedError

    def entries(self) -> list[Entry]:
        """Return all engines, by name."""
        raise NotImplementedError

    def publish(self, entry: Entry, is_gone: Callable[[Entry], bool]) -> Publication:
        """Publish the engine; ``is_gone`` says whether a holder of its name is certainly gone."""
        raise NotImplementedError

    def close(self) -> None:
        """Disconnect. Idempotent."""
