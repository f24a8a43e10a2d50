"""Files as peers, and their names."""

from typing import Any

from .. import _host
from .._arguments import as_utf8

PREFIX = "file:"


def is_file(name: Any) -> bool:
    """Whether it names a file; engines have no such names."""
    return isinstance(name, str) and name.startswith(PREFIX)


def open_file(
    engine: _host.TransferEngine, name: str, deadline_s: float, descriptor: int | None = None
) -> _host.TransferPeer:
    """Open ``file:/mnt/ssd/pool``; the host code checks the path. With a descriptor, it is the file
    of that which is opened again, and has this name.
    """
    engine.check_process("open")
    as_utf8("open", "name", name)
    place = name if descriptor is None else f"{PREFIX}/proc/self/fd/{descriptor}"
    return engine.open_file(name, place, deadline_s)
