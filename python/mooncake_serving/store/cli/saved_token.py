"""The token of a server of this machine, in a file that only its user can read."""

import contextlib
import ipaddress
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from mooncake_kernels.private_files import first_line, private_folder, write_private

FOLDER = "~/.cache/mooncake-kernels/admin-tokens"


@contextlib.contextmanager
def saved(port: int, token: str) -> Iterator[Path]:
    """Save a token for the commands of this user, as long as its server lives.

    Args:
        port: that the server listens on, at a loopback address.
        token: of it.

    Raises:
        InvalidArgument: the folder of tokens is not this user's alone.
        OSError: it cannot be written to.
    """
    path = _path(port)
    private_folder("serve", path.parent)
    write_private(path, f"{token}\n")
    try:
        yield path
    finally:
        with contextlib.suppress(OSError, ValueError):
            if first_line(path) == token:  # or it is another server's by now
                path.unlink()


def find(url: str) -> str | None:
    """Return the saved token for a URL of this machine, None if there is none."""
    try:
        parts = urlsplit(url)
        if not _is_here(parts.hostname or ""):
            return None
        return first_line(_path(parts.port or 80))
    except (OSError, ValueError):
        return None


def _path(port: int) -> Path:
    return Path(FOLDER).expanduser() / f"{socket.gethostname()}-{port}"  # homes may be shared


def _is_here(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
