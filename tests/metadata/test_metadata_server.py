"""The server itself: Mooncake's form, and conditions, expiry and listing beyond it."""

import contextlib
import http.client
import json
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from mooncake_kernels import metadata
from mooncake_kernels.__main__ import main
from mooncake_kernels.errors import Unavailable
from mooncake_kernels.metadata import values
from mooncake_kernels.metadata.server import MetadataServer
from mooncake_kernels.transfer import TransferEngine

from ..threads import in_threads
from .support import WAIT_S, HttpServer, eventually, free_port, names


@pytest.fixture
def running():
    with contextlib.closing(HttpServer()) as it:
        yield it


HttpServer.close = HttpServer.stop


def ask(port, method, query, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    with contextlib.closing(connection):
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, f"/metadata?{query}", body, headers)
        response = connection.getresponse()
        return response.status, response.read(), response.headers["ETag"]


def test_values_are_put_read_and_deleted(running):
    port = running.port
    assert ask(port, "GET", "key=mooncake%2Fram%2Fa")[0] == 404
    assert ask(port, "DELETE", "key=mooncake%2Fram%2Fa")[0] == 404
    assert ask(port, "PUT", "key=mooncake%2Fram%2Fa", b"one")[0] == 200
    assert ask(port, "PUT", "key=mooncake/ram/a", b"two")[0] == 200
    assert ask(port, "GET", "key=mooncake%2Fram%2Fa")[:2] == (200, b"two")
    assert ask(port, "DELETE", "key=mooncake%2Fram%2Fa")[0] == 200
    assert ask(port, "GET", "key=mooncake%2Fram%2Fa")[0] == 404
    assert ask(port, "PUT", "key=%E5%90%8D%00%26", b"")[0] == 200
    assert ask(port, "GET", "key=%E5%90%8D%00%26")[:2] == (200, b"")


def test_taken_name_is_not_overwritten(running):
    key = "key=mooncake%2Frpc_meta%2Fa"
    assert ask(running.port, "PUT", key, b"one")[0] == 200
    assert ask(running.port, "PUT", key, b"two")[0] == 400
    assert ask(running.port, "PUT", key, b"one")[0] == 200
    assert ask(running.port, "GET", key)[1] == b"one"


def test_conditional_puts_and_deletes(running):
    port = running.port
    assert ask(port, "PUT", "key=a", b"one", If_Match='"x"')[0] == 412
    assert ask(port, "PUT", "key=a", b"one", If_None_Match="*")[0] == 200
    assert ask(port, "PUT", "key=a", b"two", If_None_Match="*")[0] == 412
    one = ask(port, "GET", "key=a")[2]
    assert one == values.etag(b"one")
    assert ask(port, "PUT", "key=a", b"two", If_Match=one)[0] == 200
    assert ask(port, "PUT", "key=a", b"three", If_Match=one)[0] == 412
    assert ask(port, "DELETE", "key=a", If_Match=one)[0] == 412
    assert ask(port, "GET", "key=a")[1] == b"two"
    assert ask(port, "PUT", "key=a", b"three", If_None_Match=one)[0] == 400
    assert ask(port, "GET", "key=a")[1] == b"two"
    assert ask(port, "DELETE", "key=a", If_Match=values.etag(b"two"))[0] == 200
    assert ask(port, "PUT", "key=a", b"one", If_Match="*")[0] == 412
    assert ask(port, "PUT", "key=a", b"one")[0] == 200
    assert ask(port, "PUT", "key=a", b"two", If_Match="*")[0] == 200
    assert ask(port, "DELETE", "key=a", If_Match="*")[0] == 200
    assert ask(port, "DELETE", "key=a", If_Match=one)[0] == 404


def test_time_to_live_and_prefix_listing(running):
    port = running.port
    for key, time in (("a1", "&ttl_ms=100"), ("a2", "&ttl_ms=600000"), ("a3", ""), ("b1", "")):
        assert ask(port, "PUT", f"key={key}{time}", b"x")[0] == 200
    eventually(lambda: ask(port, "GET", "key=a1")[0] == 404, "it does not expire")
    assert json.loads(ask(port, "GET", "prefix=a")[1]) == ["a2", "a3"]
    assert json.loads(ask(port, "GET", "prefix=")[1]) == ["a2", "a3", "b1"]
    assert ask(port, "PUT", "key=a1", b"y", If_None_Match="*")[0] == 200
    assert ask(port, "PUT", "key=a2&ttl_ms=100", b"z")[0] == 200
    eventually(lambda: json.loads(ask(port, "GET", "prefix=a2")[1]) == [], "it does not expire")


@pytest.mark.parametrize(
    "method, query, status",
    [("GET", "", 400), ("GET", "key=", 400), ("PUT", "key=" + "x" * 1025, 400),
     ("PUT", "key=a&ttl_ms=0", 400), ("PUT", "key=a&ttl_ms=x", 400),
     ("PUT", "key=a&ttl_ms=1.5", 400), ("PUT", "key=a&ttl_ms=" + "9" * 13, 400),
     ("POST", "key=a", 501), ("DELETE", "", 400)],
)  # fmt: skip
def test_bad_requests_are_rejected(running, method, query, status):
    assert ask(running.port, method, query, b"x")[0] == status
    assert ask(running.port, "GET", "prefix=")[1] == b"[]"


def test_bad_bodies_are_rejected(running):
    head = b"PUT /metadata?key=a HTTP/1.1\r\nHost: localhost\r\n"
    for request, status in (
        (head + b"\r\n", b" 411 "),
        (head + b"Content-Length: x\r\n\r\n", b" 400 "),
        (head + b"Content-Length: -1\r\n\r\n", b" 400 "),
        (head + b"Content-Length: 99999999\r\n\r\n", b" 413 "),
        (head + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nxxx", b" 400 "),
        (b"GET /other?key=a HTTP/1.1\r\nHost: localhost\r\n\r\n", b" 404 "),
        (b"GET http://[ HTTP/1.1\r\nHost: localhost\r\n\r\n", b" 404 "),
        (b"GET /metadata?key=" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n", b" 400 "),
    ):
        with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as connection:
            connection.sendall(request)
            assert status in connection.makefile("rb").readline(), request[:60]
    with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as connection:
        connection.sendall(head + b"Content-Length: 2\r\n\r\nx")
        connection.shutdown(socket.SHUT_WR)  # the rest never comes
        assert connection.recv(100) == b""
    assert ask(running.port, "GET", "prefix=")[1] == b"[]"


def test_chunked_bodies_and_half_closed_clients(running):
    head = b"PUT /metadata?key=a HTTP/1.1\r\nHost: localhost\r\n"
    head += b"Transfer-Encoding: chunked\r\n\r\n"
    for request, end in (
        (head + b"3\r\nabc\r\n0\r\n\r\n", b"updated"),
        (b"GET /metadata?key=a HTTP/1.0\r\nHost: localhost\r\n\r\n", b"abc"),
    ):
        with socket.create_connection(("127.0.0.1", running.port), timeout=WAIT_S) as connection:
            connection.sendall(request)
            connection.shutdown(socket.SHUT_WR)
            answer = connection.makefile("rb").read()
            assert b" 200 " in answer.splitlines()[0] and answer.endswith(end)


def test_stored_keys_and_bytes_are_bounded(running, monkeypatch):
    port = running.port
    monkeypatch.setattr(values, "MAX_KEYS", 2)
    monkeypatch.setattr(values, "MAX_BYTES", 10)
    assert ask(port, "PUT", "key=a&ttl_ms=100", b"x" * 4)[0] == 200
    assert ask(port, "PUT", "key=b", b"x" * 4)[0] == 200
    assert ask(port, "PUT", "key=b", b"x" * 11)[0] == 507
    eventually(lambda: ask(port, "PUT", "key=c", b"x" * 6)[0] == 200, "what expired takes room")
    assert ask(port, "PUT", "key=d", b"")[0] == 507
    assert ask(port, "DELETE", "key=c")[0] == 200
    assert ask(port, "PUT", "key=d", b"x" * 6)[0] == 200


def test_concurrent_puts_and_deletes(running):
    def work(i):
        for k in range(20):
            assert ask(running.port, "PUT", f"key={i}.{k}", b"x", If_None_Match="*")[0] == 200
            assert ask(running.port, "DELETE", f"key={i}.{k}")[0] == 200

    in_threads(*(partial(work, i) for i in range(8)))
    assert ask(running.port, "GET", "prefix=")[1] == b"[]"
    assert running._server.values._num_bytes == 0


def test_rejection_reason_reaches_the_engine(running, monkeypatch):
    monkeypatch.setattr(values, "MAX_KEYS", 0)
    with metadata.connect(running.url.removesuffix("/metadata")) as directory:
        with pytest.raises(Unavailable, match="HTTP status 404: no such path, but /metadata"):
            TransferEngine("a", metadata=directory.url)
        with pytest.raises(Unavailable, match="no list of its keys.* 404: no such path, but /meta"):
            directory.entries()
    with pytest.raises(Unavailable, match="HTTP status 507: no room"):
        TransferEngine("a", metadata=running.url)


def start(port: int) -> subprocess.Popen:
    command = [sys.executable, "-m", "mooncake_kernels", "metadata", "--port", str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("port", [-1, 65536])
def test_command_rejects_an_invalid_port(port):
    process = start(port)
    _, error = process.communicate(timeout=WAIT_S)
    assert process.returncode == 2
    assert error.startswith(f"error: metadata: cannot listen on 127.0.0.1, port {port}: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_serves_until_a_signal(number):
    process = start(0)
    url = process.stdout.readline().strip()
    with TransferEngine("a", metadata=url):
        assert names(url) == ["a"]
        again = start(int(url.rsplit(":", 1)[1].split("/")[0]))
        assert "metadata: cannot listen on 127.0.0.1" in again.communicate(timeout=WAIT_S)[1]
        assert again.returncode == 2
    process.send_signal(number)
    assert process.communicate(timeout=WAIT_S) == ("", "")
    assert process.returncode == 0


def test_many_concurrent_clients(running):
    with ThreadPoolExecutor(32) as clients:

        def put(i):
            return ask(running.port, "PUT", f"key={i}", b"x")[0]

        assert set(clients.map(put, range(200))) == {200}


def test_command_without_uvicorn_names_the_extra(monkeypatch, capsys):
    needs_it = ("mooncake_kernels.http_server", "mooncake_kernels.metadata.server")
    for name in [name for name in sys.modules if name.startswith(needs_it)]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delattr(metadata, "server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    assert main(["metadata", "--port", "0"]) == 1
    wanted = "error: uvicorn is not installed: pip install 'mooncake-kernels[metadata]'\n"
    assert capsys.readouterr().err == wanted


def test_unlisted_host_name_is_rejected_with_a_reason(running):
    """It learns why: the server must be given the name."""
    with monkeypatched_names("meta.example"):
        with pytest.raises(Unavailable, match="HTTP status 421: Host must be one of an IP address"):
            TransferEngine("a", metadata=f"http://meta.example:{running.port}/metadata")
        with MetadataServer("127.0.0.1", 0, ["Meta.Example"]) as given:
            url = given.url.replace("127.0.0.1", "meta.example")
            with TransferEngine("a", metadata=url):
                assert names(url) == ["a"]


@contextlib.contextmanager
def monkeypatched_names(name: str):
    """Meanwhile a name resolves to this machine."""
    resolve = socket.getaddrinfo
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            socket, "getaddrinfo",
            lambda host, *rest, **more: resolve(
                "127.0.0.1" if host == name else host, *rest, **more
            ),
        )  # fmt: skip
        yield


def test_command_restarts_after_being_killed():
    port = free_port()
    process = start(port)
    url = process.stdout.readline().strip()
    with TransferEngine("a", metadata=url), metadata.connect(url) as directory:
        process.kill()
        process.communicate()
        with pytest.raises(Unavailable, match="refused"):
            directory.lookup("a")
        process = start(port)
        assert process.stdout.readline().strip() == url
        eventually(lambda: directory.lookup("a"), "the entry does not come back")
    process.kill()
    process.communicate()
