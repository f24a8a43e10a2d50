"""No server: the name of an engine is its address."""

from collections.abc import Callable
from typing import Any

from ..errors import InvalidArgument, Unavailable, shown
from .base import Metadata
from .entry import Entry


class P2P(Metadata):
    """Finds the engine that listens at ``"host:port"``, whichever it is."""

    url = "p2p"

    def check_name(self, op: str, name: Any) -> str:
        """Return the name; raise ``InvalidArgument`` unless it is text: the rest shows later."""
        if not isinstance(name, str) or not name.isascii() or not name.isprintable():
            raise InvalidArgument(f'{op}: name must be "host:port", got {shown(name)}')
        return name

    def lookup(self, name: str) -> Entry | None:
        """Return an entry with that address. Whether an engine is there shows when it is opened."""
        return Entry(self.check_name("lookup", name), name)

    def entries(self) -> list[Entry]:
        """Raise ``Unavailable``: there is no list."""
        raise Unavailable("entries: p2p has no list of engines")

    def publish(self, entry: Entry, is_gone: Callable[[Entry], bool]) -> "P2P":
        """Do nothing: listening is enough."""
        return self
