"""Access to the admin server: for callers with the token, or on this machine."""

import ipaddress
import secrets
import socket
from typing import Annotated, Any

from fastapi import Depends, HTTPException
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from mooncake_kernels.errors import InvalidArgument

# Hosts that a local browser sends, unless a page has led it here under a name of its own.
LOCAL_NAMES = ["localhost", "127.0.0.1", "[::1]"]


class TokenCheck:
    """A dependency that admits only callers with the token.

    Args:
        token: printable ASCII.

    Raises:
        InvalidArgument: the token is empty or something else.
    """

    def __init__(self, token: str):
        if not (isinstance(token, str) and token and token.isascii() and token.isprintable()):
            raise InvalidArgument("make_app: token must be printable ASCII, got something else")
        self._token = token.encode()

    def __call__(
        self,
        given: Annotated[
            HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))
        ],
    ) -> None:
        known = given.credentials.encode() if given is not None else b""
        if not secrets.compare_digest(known, self._token):
            raise HTTPException(
                401,
                "the header Authorization must be 'Bearer <the token>'",
                {"WWW-Authenticate": "Bearer"},
            )


def resolve(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """Resolve where to listen: the address family, and the address.

    Raises:
        InvalidArgument: there is no such host.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(
            f"AdminServer: host must be an address, got {host!r} ({error})"
        ) from None
    family, _, _, _, address = found[0]
    return family, address


def is_loopback(address: tuple[Any, ...]) -> bool:
    """Tell whether only processes of this machine can connect to the address."""
    return ipaddress.ip_address(address[0].partition("%")[0]).is_loopback
