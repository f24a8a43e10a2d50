"""Files as peers of ``transfer.py``: what they are called."""

from typing import Any

from . import _host
from .errors import InvalidArgument

PREFIX = "file:"


def is_file(name: Any) -> bool:
    """Whether it is the name of a file; no engine is called so."""
    return isinstance(name, str) and name.startswith(PREFIX)


def open_file(engine: _host.TransferEngine, name: str, deadline_s: float) -> _host.TransferPeer:
    """Open ``file:/mnt/ssd/pool``; the host code checks the path."""
    engine.check_process("open")
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(
            f"open: name must be text that UTF-8 can hold, got {name!r}"
        ) from None
    return engine.open(name, name, 0, deadline_s)
