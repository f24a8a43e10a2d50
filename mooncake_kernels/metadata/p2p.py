"""No server: the name of an engine is its address."""

from collections.abc import Callable
from typing import Any

from ..errors import InvalidArgument, Unavailable
from .base import Metadata
from .entry import Entry


class P2P(Metadata):
    """Finds an engine by ``"host:port"``, whoever listens there."""

    url = "p2p"

    def check_name(self, op: str, name: Any) -> str:
        """Return the name; raise ``InvalidArgument`` if it is no text: the rest shows later."""
        if not isinstance(name, str) or not name.isascii() or not name.isprintable():
            raise InvalidArgument(f'{op}: name must be "host:port", got {name!r}')
        return name

    def lookup(self, name: str) -> Entry | None:
        """Return an entry with that address. Whether anyone is there shows when it is opened."""
        return Entry(name, name)

    def entries(self) -> list[Entry]:
        """Raise ``Unavailable``: nobody knows."""
        raise Unavailable("entries: p2p has no list of engines")

    def publish(self, entry: Entry, is_gone: Callable[[Entry], bool]) -> "P2P":
        """Do nothing: to listen is all that it takes."""
        return self
