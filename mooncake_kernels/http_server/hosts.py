"""Which names a server answers to: a page in a browser must not reach it under a name of its own.

A page whose name its owner lets resolve to this machine (DNS rebinding) is of the same origin for
the browser, and so may send and read anything. Its requests carry its name in ``Host``. Requests
that a page sends to another origin carry ``Origin``, or ``Sec-Fetch-Site``.
"""

import ipaddress
import re
from collections.abc import Collection, Iterable

# Hosts that a local client sends.
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")

_HOST = re.compile(r"(\[[0-9a-f:.]+(?:%[\w.-]+)?\]|[\w.-]+)(?::[0-9]{1,5})?", re.ASCII)
_SAME_SITE = (b"same-origin", b"none")


class CallerRefused(Exception):
    """A request that is not answered; the message says why.

    Attributes:
        status: of the answer.
        header: that is wrong.
    """

    def __init__(self, status: int, header: str, why: str):
        super().__init__(why)
        self.status, self.header = status, header


class HostRule:
    """The names a server answers to.

    Args:
        names: as the header ``Host`` has them, without a port.
        any_address: whether also any IP address: no page has one as a name that resolves elsewhere.
    """

    def __init__(self, names: Iterable[str], *, any_address: bool):
        self._names = list(dict.fromkeys(name.lower() for name in names))
        self._any_address = any_address

    def check(self, headers: Collection[tuple[bytes, bytes]]) -> None:
        """Check the headers of a request.

        Raises:
            CallerRefused: it was sent to another name, or by a page of another origin.
        """
        hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
        host = hosts[0] if len(hosts) == 1 else ""
        name = host_name(host)
        if name is None or not (name in self._names or (self._any_address and _is_address(name))):
            known = ", ".join([*(["an IP address"] if self._any_address else []), *self._names])
            raise CallerRefused(421, "Host", f"Host must be one of {known}, got {host!a:.80}")
        for header, value in headers:
            if header == b"origin" and value.lower() not in (
                f"http://{host}".encode(),
                f"https://{host}".encode(),
            ):
                got = value.decode("latin-1")
                raise CallerRefused(403, "Origin", f"Origin must be {host}, got {got!a:.80}")
            if header == b"sec-fetch-site" and value.lower() not in _SAME_SITE:
                got = value.decode("latin-1")
                raise CallerRefused(
                    403, "Sec-Fetch-Site", f"Sec-Fetch-Site must be same-origin, got {got!a:.80}"
                )


def host_name(host: str) -> str | None:
    """The name in a header ``Host`` of lower case, without its port; None: it is malformed."""
    match = _HOST.fullmatch(host)
    if match is None or (match.end(1) < len(host) and int(host[match.end(1) + 1 :]) > 65_535):
        return None
    return match[1]


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name[1:-1] if name.startswith("[") else name)
    except ValueError:
        return False
    return True
