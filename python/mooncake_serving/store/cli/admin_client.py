"""A client of admin servers, over TCP or a Unix socket."""

import contextlib
import http.client
import ipaddress
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mooncake_kernels import config
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.metadata.url import without_secrets
from mooncake_kernels.private_files import first_line, private_folder, write_private

TIMEOUT_S = 10
SCHEMES = ("http://", "https://", "unix:///")
FOLDER = "~/.cache/mooncake-kernels/admin-tokens"


class AdminClient:
    """Sends requests to an admin server.

    Args:
        url: ``http://``, ``https://`` or ``unix://`` and the path of a socket.
        token: None: ``MOONCAKE_KERNELS_ADMIN_TOKEN``, or what ``serve`` has saved for this port.

    Attributes:
        url: for messages: without a slash at its end, or a login.
    """

    def __init__(self, url: str, token: str | None):
        self._url = url.rstrip("/")
        self.url = without_secrets(self._url)
        self._token = token or config.current().admin_token or find_token(self._url)

    def request(self, path: str, body: bytes | None = None, *, method: str | None = None) -> bytes:
        """Send a request: ``method``, or else GET, or POST if there is a body of JSON.

        Raises:
            OSError: the server refuses or does not answer; the message has its reason.
            InvalidArgument: the URL is not an address.
        """
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        url = f"{self.url}{path}"
        local = self._url.startswith("unix://")
        try:
            asking = urllib.request.Request(
                f"http://localhost{path}" if local else f"{self._url}{path}",
                body,
                headers,
                method=method,
            )
            if local:
                opener = urllib.request.build_opener(
                    _UnixHandler(self._url.removeprefix("unix://")), urllib.request.ProxyHandler({})
                )
            else:
                opener = urllib.request.build_opener()
            with opener.open(asking, timeout=TIMEOUT_S) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            text = error.read(4096).decode(errors="replace")
            raise OSError(f"{url} answers {error.code}: {text}") from None
        except urllib.error.URLError as error:
            raise OSError(f"{url} does not answer: {error.reason}") from None
        except (ValueError, http.client.InvalidURL) as error:
            raise InvalidArgument(
                f"mooncake-store: URL must be an http address, got {url} ({error})"
            ) from None
        except (OSError, http.client.HTTPException) as error:  # while it answers
            raise OSError(f"{url} does not answer as a web server does: {error!r}") from None

    def is_none(self, reason: str) -> OSError:
        """The error that something else listens at the URL."""
        return OSError(f"{self.url} is no admin server of a store: {reason}")


class _UnixHandler(urllib.request.HTTPHandler):
    """Opens URLs at a Unix socket, whatever host they name."""

    def __init__(self, path: str):
        super().__init__()
        self._path = path

    def http_open(self, request: urllib.request.Request) -> Any:
        def connect(host: str, **options: Any) -> http.client.HTTPConnection:
            return _UnixConnection(self._path, host, **options)

        return self.do_open(connect, request)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, host: str, **options: Any):
        super().__init__(host, **options)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


@contextlib.contextmanager
def saved_token(port: int, token: str) -> Iterator[Path]:
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


def find_token(url: str) -> str | None:
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
