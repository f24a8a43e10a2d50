"""Where a server listens: TCP addresses, and Unix sockets that only their owner reaches."""

import contextlib
import ipaddress
import os
import socket
import stat
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument
from ..private_files import private_folder

Address = tuple[Any, ...]


def resolve(op: str, host: str) -> tuple[int, Address]:
    """Resolve where to listen: the address family, and an address with port 0.

    Args:
        op: the call, which errors name.
        host: name or address.

    Raises:
        InvalidArgument: there is no such host.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"{op}: host must be an address, got {host!r} ({error})") from None
    family, _, _, _, address = found[0]
    return family, address


def listen(op: str, host: str, port: int) -> socket.socket:
    """Listen at a TCP address; port 0: a free one. ``op`` and ``host`` as in ``resolve``.

    Raises:
        InvalidArgument: there is no such host.
        OSError: the address is in use, ...
        OverflowError: there is no such port.
    """
    family, address = resolve(op, host)
    return socket.create_server((address[0], port, *address[2:]), family=family)


def listen_unix(op: str, path: Path) -> socket.socket:
    """Listen at a Unix socket of mode 0600, in a folder that only its owner may enter.

    The folder is made if it is missing. A socket that a killed server has left is replaced.

    Args:
        op: the call, which errors name.
        path: of the socket, absolute.

    Raises:
        InvalidArgument: the path is relative or too long; the folder is another user's, or others
            may enter it; something else has the path.
        OSError: a server listens there; the folder cannot be made.
    """
    if not path.is_absolute() or len(os.fsencode(path)) > 100:
        raise InvalidArgument(
            f"{op}: socket must be an absolute path of at most 100 bytes, got {str(path)!r}"
        )
    private_folder(op, path.parent)
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise InvalidArgument(f"{op}: socket must be free, got {path}, which is a file")
        with socket.socket(socket.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()
            else:
                raise OSError(f"{op}: a server listens at {path}")
    listening = socket.socket(socket.AF_UNIX)
    try:
        listening.bind(str(path))
        path.chmod(0o600)
        listening.listen()
    except BaseException:
        listening.close()
        raise
    return listening


def in_url(host: str) -> str:
    """An address, as URLs and the header ``Host`` have it."""
    return f"[{host}]" if ":" in host else host


def is_loopback(address: Address) -> bool:
    """Whether only processes of this machine can connect to a TCP address."""
    return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
