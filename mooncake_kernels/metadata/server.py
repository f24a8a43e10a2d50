"""A metadata server of Mooncake's HTTP form, in memory, for a cluster without Redis.

``python -m mooncake_kernels metadata --port 8080``. Mooncake's engines can use it, too. In addition
to Mooncake's own servers, it supports a time to live (``&ttl_ms=``), conditions (``If-Match``,
``If-None-Match: *``) and a list (GET of ``?prefix=``). There is no login and no TLS.
"""

import json
import logging
import math
import re
import signal
import socket
import socketserver
import sys
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl

from . import bounded_socket
from .bounded_socket import BoundedSocket
from .untrusted import MAX_VALUE_BYTES, printable
from .values import Full, Values, etag

PATH = "/metadata"
MAX_KEY_CHARS = 1024
MAX_REQUESTS = 64  # at a time; further ones wait, and are closed after bounded_socket.TIMEOUT_S

_log = logging.getLogger(__name__)


class Refused(Exception):
    """An error answer in place of a value."""

    def __init__(self, status: HTTPStatus, why: str):
        super().__init__(why)
        self.status = status


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: "MetadataServer"
    server_version = "mooncake_kernels"
    sys_version = ""

    def setup(self) -> None:
        self.request: Any = BoundedSocket(self.request)
        super().setup()

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except OSError as error:
            _log.debug("%s: %s", self.client_address[0], error)
        self.close_connection = True

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_PUT(self) -> None:
        self._answer(self._put)

    def do_DELETE(self) -> None:
        self._answer(self._delete)

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("%s %s", self.client_address[0], printable(format % args))

    def _answer(self, act: Callable[[dict[str, str]], bytes]) -> None:
        path, _, query = self.path.partition("?")
        status = HTTPStatus.OK
        try:
            if path != PATH:
                raise Refused(HTTPStatus.NOT_FOUND, f"no such path, but {PATH}")
            body = act(dict(parse_qsl(query, keep_blank_values=True)))
        except Refused as refused:
            status, body = refused.status, str(refused).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        if status == HTTPStatus.OK and "key=" in query and self.command == "GET":
            self.send_header("ETag", etag(body))
        self.end_headers()
        self.wfile.write(body)

    def _get(self, query: dict[str, str]) -> bytes:
        if "prefix" in query:
            return json.dumps(self.server.values.keys(query["prefix"])).encode()
        value = self.server.values.get(_key(query))
        if value is None:
            raise Refused(HTTPStatus.NOT_FOUND, "no such key")
        return value

    def _put(self, query: dict[str, str]) -> bytes:
        key, ttl_s, value = _key(query), _ttl_s(query), self._body()
        match, none_match = self.headers.get("If-Match"), self.headers.get("If-None-Match")
        if none_match not in (None, "*"):
            raise Refused(HTTPStatus.BAD_REQUEST, "If-None-Match must be *")
        absent = none_match is not None
        # Like Mooncake's servers: the holder keeps its name, and may claim it again.
        claims = match is None and not absent and "rpc_meta" in key
        put = self.server.values.put
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

    def _delete(self, query: dict[str, str]) -> bytes:
        done = self.server.values.remove(_key(query), self.headers.get("If-Match"))
        if done is None:
            raise Refused(HTTPStatus.NOT_FOUND, "no such key")
        if not done:
            raise Refused(HTTPStatus.PRECONDITION_FAILED, "another value")
        return b"deleted"

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch("[0-9]{1,12}", length):
            raise Refused(HTTPStatus.LENGTH_REQUIRED, "Content-Length must be given")
        if int(length) > MAX_VALUE_BYTES:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"more than {MAX_VALUE_BYTES} bytes")
        value = self.rfile.read(int(length))
        if len(value) != int(length):
            raise Refused(HTTPStatus.BAD_REQUEST, "the body ends too early")
        return value


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


class MetadataServer(ThreadingHTTPServer):
    """Serves until ``shutdown()``; see ``socketserver``."""

    request_queue_size = 1024

    def __init__(self, host: str, port: int):
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.values = Values()
        self._slots = threading.BoundedSemaphore(MAX_REQUESTS)
        super().__init__((host, port), Handler)
        host = f"[{host}]" if ":" in host else host
        self.url = f"http://{host}:{self.server_address[1]}{PATH}"

    def server_bind(self) -> None:
        socketserver.TCPServer.server_bind(self)  # http.server would resolve our name by DNS

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._slots.acquire(timeout=bounded_socket.TIMEOUT_S):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # for instance because no thread could be started
            self._slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.exception("a request of %s", client_address[0])


def run(host: str, port: int) -> int:
    """Serve until SIGINT or SIGTERM; return the exit status.

    Raises:
        OSError: it cannot listen there.
    """
    try:
        server = MetadataServer(host, port)
    except (OSError, OverflowError) as error:  # the latter: no port has such a number
        raise OSError(f"metadata: cannot listen on {host}, port {port}: {error}") from None
    # A handler could raise anywhere in the loop, even where that is taken for a request's error.
    signals = {signal.SIGINT, signal.SIGTERM}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        with server:
            sys.stdout.write(f"{server.url}\n")
            sys.stdout.flush()
            threading.Thread(target=server.serve_forever, daemon=True).start()
            signal.sigwait(signals)
            server.shutdown()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0
