"""Where a server listens: TCP addresses, and Unix sockets that only their owner reaches."""

import contextlib
import ipaddress
import os
import socket
import stat
from pathlib import Path
from typing import Any

from ..errors import InvalidArgument


def listen(op: str, host: str, port: int) -> socket.socket:
    """Listen at a TCP address.

    Args:
        op: the call, which errors name.
        host: name or address.
        port: 0: a free one.

    Raises:
        InvalidArgument: there is no such host.
        OSError: the address is in use, ...
        OverflowError: there is no such port.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"{op}: host must be an address, got {host!r} ({error})") from None
    family, _, _, _, address = found[0]
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


def private_folder(op: str, folder: Path) -> None:
    """Make a folder of mode 0700, or check that one is its owner's alone.

    Raises:
        InvalidArgument: it is another user's, or others may enter it.
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidArgument(
            f"{op}: {folder} must be a folder of this user of mode 0700, got mode "
            f"{stat.S_IMODE(found.st_mode):04o} of uid {found.st_uid}"
        )


def in_url(host: str) -> str:
    """An address, as URLs and the header ``Host`` have it."""
    return f"[{host}]" if ":" in host else host


def is_loopback(listening: socket.socket) -> bool:
    """Whether only processes of this machine can connect."""
    if listening.family == socket.AF_UNIX:
        return True
    address: tuple[Any, ...] = listening.getsockname()
    return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
