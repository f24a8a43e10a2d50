"""Where the directory of a store is, according to the ``master`` at a ``host:port``.

A master sends one line to everyone who connects, and reads nothing:
``mooncake-kernels directory redis://10.0.0.1:6379/0``. A URL without a host, ``redis://:6379/0``,
is at the host of the master.
"""

import os
import socket
import time
from collections.abc import Mapping
from urllib.parse import urlencode

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.metadata.url import parse_url, without_secrets

GREETING = b"mooncake-kernels directory "
MAX_BYTES = 2048  # of the line
SCHEMES = ("redis://", "rediss://", "unix://", "redis+sentinel://")
COMMAND = "python -m mooncake_serving.compat.mooncake.master"
DEADLINE_S = 5.0  # to connect and be told


def directory_at(address: str, environ: Mapping[str, str] = os.environ) -> str:
    """Ask the master at ``"host:port"`` for the URL of its directory.

    ``MC_REDIS_USERNAME`` and ``MC_REDIS_PASSWORD`` are its login, which a master does not tell.
    They go to the master's own host, and to the one that ``MC_REDIS_HOST`` names (several, for
    sentinels, with commas): anyone may be at the port of a master, and name a server of his own.

    Raises:
        InvalidArgument: the address is no ``host:port``.
        Unavailable: there is no master, it does not answer in time, or the login is not for the
            directory that it names.
    """
    host, port = _split(address)
    told = _told_by(host, port, address)
    url = told.removeprefix(GREETING).decode("ascii", "replace").strip()
    if not told.startswith(GREETING) or not url.startswith(SCHEMES) or not url.isprintable():
        raise _no_master(address, f"it sends {told[:60]!r}")
    scheme, _, rest = url.partition("://")
    if rest.startswith(":"):
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}{rest}"
    with_its_login = with_login(url, environ)
    if with_its_login != url:
        _check_host(url, address, {host, *environ.get("MC_REDIS_HOST", "").split(",")})
    return with_its_login


def with_login(url: str, environ: Mapping[str, str] = os.environ) -> str:
    """The same URL with the login of the environment."""
    login = {n: environ.get(f"MC_REDIS_{n.upper()}", "") for n in ("username", "password")}
    query = urlencode({name: value for name, value in login.items() if value})
    return f"{url}{'&' if '?' in url else '?'}{query}" if query else url


def _check_host(url: str, address: str, allowed: set[str]) -> None:
    """Refuse to send the environment's login to other hosts."""
    try:
        parsed = parse_url("directory_at", "url", url)
    except InvalidArgument as error:
        raise _no_master(address, f"it names no directory ({error})") from None
    hosts = [name for name, _ in parsed.sentinels] or [parsed.parts.hostname or ""]
    if not {one.lower() for one in hosts} <= {one.strip().lower() for one in allowed if one}:
        raise Unavailable(
            "MC_REDIS_USERNAME and MC_REDIS_PASSWORD are sent to the host of the master only, and "
            f"{without_secrets(address):.80} names the directory {parsed!s:.200}: set "
            f"MC_REDIS_HOST to {','.join(hosts) or 'its host'} if they are for it, or unset them"
        )


def _told_by(host: str, port: int, address: str) -> bytes:
    """The first line that is sent by what listens there."""
    until_s = time.monotonic() + DEADLINE_S
    told = b""
    try:
        with socket.create_connection((host, port), timeout=DEADLINE_S) as connected:
            while b"\n" not in told and len(told) < MAX_BYTES:
                connected.settimeout(max(until_s - time.monotonic(), 0.001))
                if not (piece := connected.recv(MAX_BYTES)):
                    break
                told += piece
    except TimeoutError:
        raise _no_master(address, f"it says nothing within {DEADLINE_S:.0f} s") from None
    except OSError as error:
        raise _no_master(address, error.strerror or str(error)) from None
    except ValueError as error:  # also of IDNA: no name of a host
        raise _no_master(address, str(error)) from None
    return told


def _no_master(address: str, reason: str) -> Unavailable:
    return Unavailable(
        f"master_server_addr must be where `{COMMAND}` runs, the path of a pool (/dev/shm/kv) or "
        f"the URL of a directory (redis://host:port), got {without_secrets(address):.80}: "
        f"{reason}; a "
        "mooncake_master speaks a protocol of its own"
    )


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    is_host = host and not set("/@") & set(host)  # a URL's password is none to look up
    if not is_host or not (port.isascii() and port.isdecimal()) or not 0 < int(port) < 65536:
        raise InvalidArgument(
            "master_server_addr must be the path of a pool (/dev/shm/kv), the URL of a directory "
            "(redis://host:port) or the host:port of a master, got "
            f"{without_secrets(address)!r:.80}"
        )
    return host, int(port)
