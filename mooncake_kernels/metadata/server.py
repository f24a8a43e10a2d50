"""A metadata server of Mooncake's HTTP form, in memory, for a cluster without Redis.

``python -m mooncake_kernels metadata --port 8080``. Mooncake's engines can use it, too. In addition
to Mooncake's own servers, it supports a time to live (``&ttl_ms=``), conditions (``If-Match``,
``If-None-Match: *``) and a list (GET of ``?prefix=``). There is no login and no TLS.
"""

import json
import math
import re
import signal
import socket
import sys
from collections.abc import Iterable
from http import HTTPStatus
from urllib.parse import parse_qsl

from ..closeable import Closeable
from ..errors import InvalidArgument
from ..http_server import (
    LOCAL_NAMES,
    BodyRefused,
    CallerRefused,
    HostRule,
    HttpServer,
    Limits,
    host_name,
    in_url,
    listen,
    read_body,
    silence_uvicorn,
)
from ..http_server.asgi import Receive, Scope, Send
from .untrusted import MAX_VALUE_BYTES
from .values import Full, Values, etag

PATH = "/metadata"
MAX_KEY_CHARS = 1024
PIECE_BYTES = 256 << 10  # of an answer: only that much of it is copied for a slow reader
LIMITS = Limits(body_bytes=MAX_VALUE_BYTES)


class Refused(Exception):
    """An error answer in place of a value."""

    def __init__(self, status: int, why: str):
        super().__init__(why)
        self.status = status


class MetadataApp:
    """The ASGI app: one path, three methods."""

    def __init__(self, values: Values, rule: HostRule):
        self._values, self._rule = values, rule

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = [(b"content-type", b"application/json")]
        status: int = HTTPStatus.OK
        try:
            body = await self._act(scope, receive)
            if body is None:  # the client is gone
                return
            if scope["method"] == "GET" and b"key=" in scope["query_string"]:
                headers.append((b"etag", etag(body).encode()))
        except (Refused, BodyRefused, CallerRefused) as refused:
            status, body = refused.status, str(refused).encode("ascii", "replace")
        headers.append((b"content-length", b"%d" % len(body)))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        view = memoryview(body)
        for at in range(0, max(1, len(body)), PIECE_BYTES):
            piece = bytes(view[at : at + PIECE_BYTES])
            is_last = at + PIECE_BYTES >= len(body)
            await send({"type": "http.response.body", "body": piece, "more_body": not is_last})

    async def _act(self, scope: Scope, receive: Receive) -> bytes | None:
        self._rule.check(scope["headers"])
        if scope["path"] != PATH:
            raise Refused(HTTPStatus.NOT_FOUND, f"no such path, but {PATH}")
        method = scope["method"]
        if method not in ("GET", "PUT", "DELETE"):
            raise Refused(HTTPStatus.NOT_IMPLEMENTED, "method must be GET, PUT or DELETE")
        query = dict(parse_qsl(scope["query_string"].decode("ascii"), keep_blank_values=True))
        given = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        if method == "GET":
            return self._get(query)
        if method == "DELETE":
            return self._delete(query, given)
        key, ttl_s = _key(query), _ttl_s(query)
        if "content-length" not in given and "transfer-encoding" not in given:
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length must be given")
        value = await read_body(scope, receive, MAX_VALUE_BYTES)
        return None if value is None else self._put(key, ttl_s, value, given)

    def _get(self, query: dict[str, str]) -> bytes:
        if "prefix" in query:
            keys = json.dumps(self._values.keys(query["prefix"])).encode()
            if len(keys) > MAX_VALUE_BYTES:
                raise Refused(
                    HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                    f"the list has more than {MAX_VALUE_BYTES} bytes: prefix must be longer",
                )
            return keys
        value = self._values.get(_key(query))
        if value is None:
            raise Refused(HTTPStatus.NOT_FOUND, "no such key")
        return value

    def _put(self, key: str, ttl_s: float, value: bytes, headers: dict[str, str]) -> bytes:
        match, none_match = headers.get("if-match"), headers.get("if-none-match")
        if none_match not in (None, "*"):
            raise Refused(HTTPStatus.BAD_REQUEST, "If-None-Match must be *")
        absent = none_match is not None
        # Like Mooncake's servers: the holder keeps its name, and may claim it again.
        claims = match is None and not absent and "rpc_meta" in key
        put = self._values.put
        try:
            done = put(key, value, ttl_s, match, absent or claims)
            if not done and claims:
                done = put(key, value, ttl_s, etag(value), False)
        except Full:
            raise Refused(HTTPStatus.INSUFFICIENT_STORAGE, "no room") from None
        if not done:
            status = HTTPStatus.BAD_REQUEST if claims else HTTPStatus.PRECONDITION_FAILED
            raise Refused(status, "the key is taken" if claims or absent else "another value")
        return b"updated"

    def _delete(self, query: dict[str, str], headers: dict[str, str]) -> bytes:
        done = self._values.remove(_key(query), headers.get("if-match"))
        if done is None:
            raise Refused(HTTPStatus.NOT_FOUND, "no such key")
        if not done:
            raise Refused(HTTPStatus.PRECONDITION_FAILED, "another value")
        return b"deleted"


def _key(query: dict[str, str]) -> str:
    key = query.get("key", "")
    if not 1 <= len(key) <= MAX_KEY_CHARS:
        raise Refused(HTTPStatus.BAD_REQUEST, f"key must be 1 to {MAX_KEY_CHARS} characters")
    return key


def _ttl_s(query: dict[str, str]) -> float:
    ttl_ms = query.get("ttl_ms")
    if ttl_ms is None:
        return math.inf
    if not re.fullmatch("[1-9][0-9]{0,11}", ttl_ms):
        raise Refused(HTTPStatus.BAD_REQUEST, "ttl_ms must be a number of milliseconds")
    return int(ttl_ms) / 1000


class MetadataServer(Closeable):
    """Serves until it is closed. A context manager.

    It answers requests to an IP address, to ``localhost``, to this machine's name and to the names
    it is given: see ``http_server.hosts``.

    Args:
        host: address to listen on, or a name of one.
        port: 0: a free one.
        allow_hosts: further names by which clients know this machine.
        limits: of its connections.

    Attributes:
        url: of the server.
        values: what it holds.

    Raises:
        InvalidArgument: there is no such host, or a name is none.
        OSError, OverflowError: it cannot listen there.
    """

    def __init__(
        self, host: str, port: int, allow_hosts: Iterable[str] = (), limits: Limits = LIMITS
    ):
        names = [*LOCAL_NAMES, in_url(host), socket.gethostname()]
        for name in allow_hosts:
            if host_name(name.lower()) != name.lower():
                raise InvalidArgument(
                    f"metadata: allow_host must be a name as URLs have it, without a port, "
                    f"got {name!r:.80}"
                )
            names.append(name)
        listening = listen("metadata", host, port)
        self.values = Values()
        self.url = f"http://{in_url(host)}:{listening.getsockname()[1]}{PATH}"
        app = MetadataApp(self.values, HostRule(names, any_address=True))
        self._server = HttpServer(app, listening, name="metadata-server", limits=limits)

    def close(self) -> None:
        """Answer the requests in flight, then stop. Idempotent."""
        self._server.close()


def run(host: str, port: int, allow_hosts: Iterable[str] = ()) -> int:
    """Serve until SIGINT or SIGTERM; return the exit status.

    Raises:
        OSError: it cannot listen there.
    """
    silence_uvicorn()
    signals = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # for the server's thread, too
    try:
        try:
            server = MetadataServer(host, port, allow_hosts)
        except (OSError, OverflowError) as error:  # the latter: no port has such a number
            raise OSError(f"metadata: cannot listen on {host}, port {port}: {error}") from None
        with server:
            sys.stdout.write(f"{server.url}\n")
            sys.stdout.flush()
            signal.sigwait(signals)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0
