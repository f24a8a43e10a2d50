"""A client of admin servers, over TCP or a Unix socket."""

import http.client
import socket
import urllib.error
import urllib.request
from typing import Any

from mooncake_kernels import config
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.metadata.url import without_secrets

from . import saved_token

TIMEOUT_S = 10
SCHEMES = ("http://", "https://", "unix:///")


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
        self._token = token or config.current().admin_token or saved_token.find(self._url)

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
