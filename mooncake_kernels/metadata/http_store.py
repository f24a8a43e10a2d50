"""Mooncake's HTTP form: GET, PUT and DELETE of ``?key=``; and our server's extensions.

Mooncake's own servers have no conditions, no time to live and no list, and ignore what they do not
know. They refuse to overwrite a key of ``rpc_meta`` (400), so only one engine can take a name
there, too. But taking it over from an engine that is gone, or releasing it, takes two requests,
between which another client may act.
"""

import contextlib
import http.client
import json
import ssl
from typing import Any
from urllib.parse import quote, urlencode

from . import bounded_socket
from .bounded_socket import BoundedSocket
from .untrusted import MAX_VALUE_BYTES
from .url import MetadataUrl, basic
from .values import etag

OK, CREATED, BAD_REQUEST, NOT_FOUND, CHANGED = 200, 201, 400, 404, 412


class HttpStore:
    """A ``Store`` behind a URL. Makes a new connection for each request."""

    def __init__(self, url: MetadataUrl):
        self._url = url
        self._headers = {"Content-Type": "application/json", "Connection": "close"}
        if any(url.login):
            self._headers["Authorization"] = f"Basic {basic(*url.login)}"

    def get(self, key: str) -> bytes | None:
        status, value = self._request("GET", {"key": key})
        if status == NOT_FOUND:
            return None
        self._expect(status == OK, status, value)
        return value

    def keys(self, prefix: str) -> list[str]:
        status, value = self._request("GET", {"prefix": prefix})
        if status in (BAD_REQUEST, NOT_FOUND):
            told = _told(status, value)
            raise self._url.error(f"it has no list of its keys, as Mooncake's own servers: {told}")
        self._expect(status == OK, status, value)
        try:
            keys = json.loads(value)
        except (ValueError, RecursionError):
            keys = None
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise self._url.error("a list of keys that is none")
        return [key for key in keys if key.startswith(prefix)]

    def create(self, key: str, value: bytes, ttl_ms: int) -> bool:
        status = self._put(key, value, ttl_ms, {"If-None-Match": "*"})
        return status in (OK, CREATED)

    def replace(self, key: str, expected: bytes, value: bytes, ttl_ms: int) -> bool:
        status = self._put(key, value, ttl_ms, {"If-Match": etag(expected)})
        if status != BAD_REQUEST:
            return status != CHANGED
        held = self.get(key)  # a server that never overwrites
        if held == expected != value:
            self.remove(key, expected)
            return self.create(key, value, ttl_ms)
        return held == value

    def remove(self, key: str, expected: bytes) -> None:
        if self.get(key) != expected:  # a server without conditions would not check
            return
        condition = {"If-Match": etag(expected)}
        status, why = self._request("DELETE", {"key": key}, headers=condition)
        self._expect(status in (OK, NOT_FOUND, CHANGED), status, why)

    def close(self) -> None:
        pass

    def _put(self, key: str, value: bytes, ttl_ms: int, condition: dict[str, str]) -> int:
        query = {"key": key, "ttl_ms": str(ttl_ms)}
        status, why = self._request("PUT", query, value, condition)
        self._expect(status in (OK, CREATED, BAD_REQUEST, CHANGED), status, why)
        return status

    def _request(
        self,
        method: str,
        query: dict[str, str],
        value: bytes | None = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, bytes]:
        target = f"{self._url.parts.path or '/'}?{urlencode(query, quote_via=quote, safe='')}"
        try:
            with contextlib.closing(self._connection()) as connection:
                connection.connect()
                bounded: Any = BoundedSocket(connection.sock)
                connection.sock = bounded
                connection.request(method, target, value, {**self._headers, **(headers or {})})
                response = http.client.HTTPResponse(bounded, method=method)
                response.begin()
                body = response.read(MAX_VALUE_BYTES + 1)
                if len(body) <= MAX_VALUE_BYTES and response.length:
                    raise http.client.IncompleteRead(body, response.length)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._url.error(str(error) or type(error).__name__) from None
        if len(body) > MAX_VALUE_BYTES:
            raise self._url.error(f"more than {MAX_VALUE_BYTES} bytes")
        return response.status, body

    def _connection(self) -> http.client.HTTPConnection:
        host, port = self._url.parts.hostname or "", self._url.parts.port
        timeout_s = bounded_socket.TIMEOUT_S
        if self._url.parts.scheme == "http":
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        authority = self._url.options.get("ssl_ca_certs")
        try:
            context = ssl.create_default_context(cafile=authority)
        except OSError as error:  # which does not name the file
            raise self._url.error(f"ssl_ca_certs={authority}: {error}") from None
        return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=context)

    def _expect(self, condition: bool, status: int, why: bytes) -> None:
        if not condition:
            raise self._url.error(_told(status, why))


def _told(status: int, why: bytes) -> str:
    """What a server has told with an error."""
    words = why.decode("ascii", "replace").strip()
    return f"HTTP status {status}{f': {words}' if words else ''}"
