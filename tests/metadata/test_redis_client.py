"""Pooled connections to Redis: reused while they are good, and no longer."""

import contextlib
import hashlib
import os
import select
import socket
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import itemgetter
from types import SimpleNamespace

import pytest
import redis

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.metadata import bounded_socket
from mooncake_kernels.metadata.bounded_socket import BoundedSocket
from mooncake_kernels.metadata.redis_client import RedisClient, RedisConnection, pack
from mooncake_kernels.metadata.url import parse_url

from ..threads import in_threads
from .support import (
    WAIT_S,
    RedisServer,
    eventually,
    impatience,
    make_certificate,
    raw_server,
)


@pytest.fixture
def server(tmp_path):
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def client(server):
    client = client_of(server.url)
    yield client
    client.close()


@pytest.fixture
def other(server):
    """Looks at what the server has of the client."""
    with redis.Redis(port=server.port) as other:
        yield other


def client_of(url: str) -> RedisClient:
    return RedisClient(parse_url("test", "url", url))


def ask(client: RedisClient, *command):
    return client.ask([pack(*command)], itemgetter(0))


def num_connections(other: redis.Redis) -> int:
    return len(other.client_list()) - 1  # its own


@pytest.fixture
def sides():
    """Ours and theirs."""
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def connection_over(connected: socket.socket) -> RedisConnection:
    return RedisConnection(SimpleNamespace(_sock=BoundedSocket(connected)))


def test_pending_bytes_and_the_end_are_not_quiet(sides):
    ours, theirs = sides
    connection = connection_over(ours)
    assert connection.is_quiet()
    theirs.sendall(b"ab")
    assert not connection.is_quiet()
    assert ours.recv(100)[-1:] == b"b" and connection.is_quiet()
    theirs.close()
    assert not connection.is_quiet()


def test_a_closed_socket_is_not_quiet(sides):
    ours, _ = sides
    connection = connection_over(ours)
    ours.close()
    assert not connection.is_quiet()


def test_tickets_of_tls_are_quiet(sides, tmp_path):
    ours, theirs = sides
    certificate, key = make_certificate(tmp_path)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.create_default_context()
    server.load_cert_chain(certificate, key)
    client.load_verify_locations(certificate)
    with ThreadPoolExecutor(1) as pool:
        wrapping = pool.submit(server.wrap_socket, theirs, server_side=True)
        encrypted = client.wrap_socket(ours, server_hostname="localhost")
        theirs = wrapping.result()
    with theirs, encrypted:
        connection = connection_over(encrypted)
        assert select.select([encrypted], [], [], WAIT_S)[0], "no ticket has come"
        assert connection.is_quiet() and connection.is_quiet()
        encrypted.settimeout(WAIT_S)
        encrypted.sendall(b"a question")
        assert theirs.recv(100) == b"a question"
        theirs.sendall(b"abc")
        assert encrypted.recv(1) == b"a"
        assert not connection.is_quiet(), "TLS has read ahead"
        assert encrypted.recv(2) == b"bc" and connection.is_quiet()
        theirs.sendall(b"d")
        assert not connection.is_quiet()


def test_connection_is_reused(client, other):
    first = ask(client, "CLIENT", "ID")
    assert ask(client, "SET", "key", b"\r\n\0\xff") == b"OK"
    assert ask(client, "GET", "key") == b"\r\n\0\xff"
    assert ask(client, "ECHO", "é") == "é".encode()
    assert ask(client, "ECHO", 7) == b"7"
    assert ask(client, "CLIENT", "ID") == first
    assert num_connections(other) == 1


def test_tls_connection_is_reused(tls_url):
    client = client_of(tls_url)
    first = ask(client, "CLIENT", "ID")
    assert ask(client, "ECHO", 100_000 * "x") == 100_000 * b"x"  # several of its records
    assert ask(client, "CLIENT", "ID") == first
    client.close()


def test_commands_are_pipelined(client, other):
    commands = [pack("INCRBY", "count", i) for i in range(100)]
    commands += [pack("ECHO", 100_000 * "x"), pack("ECHO", num_more=1) + b"$2\r\n\xc3\xa9\r\n"]
    replies = client.ask(commands, list)
    assert replies[98:] == [4851, 4950, 100_000 * b"x", "é".encode()]
    assert client.ask([], list) == []
    assert client.ask([pack("ECHO", 7)], lambda replies, *rest: (*replies, *rest), 8) == (b"7", 8)


def test_error_replies_keep_the_connection(client):
    first = ask(client, "CLIENT", "ID")
    for wrong, why in ((("NO",), "unknown command .NO"), (("EVALSHA", 40 * "0", 0), "script")):
        commands = [pack(*command) for command in (("ECHO", "a"), wrong, ("ECHO", "b"))]
        with pytest.raises(Unavailable, match=f"metadata server redis://.*{why}"):
            client.ask(commands, list)
        assert ask(client, "ECHO", "c") == b"c"
    assert ask(client, "CLIENT", "ID") == first


def test_unknown_script_is_loaded(client, other):
    script = "return redis.call('INCRBY', 'count', ARGV[1])"
    sha = hashlib.sha1(script.encode()).hexdigest()
    commands = [pack("EVALSHA", sha, 0, i) for i in (1, 2)]
    assert client.ask(commands, list, script=script) == [1, 3]
    assert client.ask(commands, list) == [4, 6]
    with pytest.raises(Unavailable, match="No matching script"):  # that is another
        client.ask([pack("EVALSHA", 40 * "0", 0)], list, script=script)
    with pytest.raises(Unavailable, match="unknown command"):
        client.ask([pack("NO"), *commands], list, script=script)
    assert num_connections(other) == 1


def test_read_only_reply_drops_the_connection(client, other):
    """As one that was the master: who asks again may be led to another."""
    first = ask(client, "CLIENT", "ID")
    other.replicaof("127.0.0.1", "1")
    with pytest.raises(Unavailable, match="read only replica"):
        ask(client, "SET", "key", 1)
    assert ask(client, "CLIENT", "ID") != first


def test_client_survives_a_server_restart(server, client):
    assert ask(client, "SET", "key", 1) == b"OK"
    server.stop()
    for _ in range(2):
        with pytest.raises(Unavailable, match="refused"):
            ask(client, "GET", "key")
    server.start()
    assert ask(client, "GET", "key") is None
    assert ask(client, "SET", "key", 1) == b"OK"
    server.stop()
    server.start()
    assert ask(client, "GET", "key") is None


def test_connections_closed_by_the_server_are_replaced(client, other):
    for i in range(3):
        assert ask(client, "INCR", "count") == i + 1  # once, and not twice
        assert other.client_kill_filter(_type="normal", skipme=True) == 1


def test_late_reply_is_not_mistaken_for_the_next_one(server, client):
    first = ask(client, "CLIENT", "ID")
    server.freeze()
    with impatience():
        for i in range(2):
            with pytest.raises(Unavailable, match="no whole answer within 0.4 s"):
                ask(client, "ECHO", f"late {i}")
    server.thaw()
    for i in range(3):
        assert ask(client, "ECHO", i) == b"%d" % i
    assert ask(client, "CLIENT", "ID") != first


UNFINISHED = ("half an answer", "elements without end")
NONSENSE = {
    "two answers": b":1\r\n:2\r\n",
    "one and a half": b":1\r\n$5\r\nab",
    "half an answer": b"*2\r\n:1\r\n",
    "no protocol": b"HTTP/1.1 400 Bad Request\r\n",
    "an empty line": b"\r\n",
    "no number": b":1.5\r\n",
    "a size that is none": b"$x\r\n",
    "a size below none": b"$-2\r\n",
    "a length below none": b"*-2\r\n",
    "a line that ends early": b":1\n",
    "an element that is none": b"*2\r\n:1\r\n?\r\n",
    "elements without end": b"*1000000000\r\n",
    "too many levels": b"*1\r\n" * 100_000,
    "a busy server": b"-LOADING\r\n",
    "a replica": b"-READONLY no\r\n",
    "a replica of Redis 6": b"-ERR Error running script: @user_script:1: -READONLY no\r\n",
    "a string of more than there may be": b"$2000000\r\n" + b"x" * 2_000_000,
    "a line of more than there may be": b"+" + b"x" * 2_000_000,
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_garbage_is_never_taken_for_a_later_reply(nonsense, monkeypatch):
    monkeypatch.setattr(bounded_socket, "MAX_BYTES", 1 << 20)
    asked = []

    def behave(connection):
        asked.append([])
        while message := connection.recv(1 << 16):
            asked[-1].append(message)
            connection.sendall(NONSENSE[nonsense])

    waits = impatience() if nonsense in UNFINISHED else contextlib.nullcontext()
    with raw_server(behave) as port, waits:
        client = client_of(f"redis://127.0.0.1:{port}/0")
        for _ in range(3):
            try:
                assert ask(client, "GET", "key") == 1
            except Unavailable:
                assert nonsense not in ("two answers", "one and a half")
        client.close()
    eventually(lambda: [len(messages) for messages in asked] == [1, 1, 1], f"asked {asked}")


@pytest.mark.parametrize("said", [b"", b":1", b"$5\r\nab", b"$2\r\nab\r", b"*2\r\n:1\r\n"])
def test_truncated_reply_is_reported(said):
    def behave(connection):
        connection.recv(1 << 16)
        connection.sendall(said)

    with raw_server(behave) as port:
        client = client_of(f"redis://127.0.0.1:{port}/0")
        with pytest.raises(Unavailable, match="Connection closed by server"):
            ask(client, "GET", "key")
        client.close()


REPLIES = {
    b"+OK\r\n": b"OK",
    b"+\r\n": b"",
    b":-7\r\n": -7,
    b"$0\r\n\r\n": b"",
    b"$-1\r\n": None,
    b"$6\r\na\r\n\0\xffb\r\n": b"a\r\n\0\xffb",
    b"*-1\r\n": None,
    b"*0\r\n": [],
    b"*3\r\n:1\r\n*2\r\n$1\r\na\r\n$-1\r\n+b\r\n": [1, [b"a", None], b"b"],
}


@pytest.mark.parametrize("num_bytes", [1, 3, 1000])
def test_replies_may_arrive_in_pieces(num_bytes):
    said = b"".join(REPLIES)

    def behave(connection):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while connection.recv(1 << 16):
            for i in range(0, len(said), num_bytes):
                connection.sendall(said[i : i + num_bytes])

    with raw_server(behave) as port:
        client = client_of(f"redis://127.0.0.1:{port}/0")
        for _ in range(2):
            replies = client.ask([pack("GET", "key")] * len(REPLIES), list)
            assert replies == list(REPLIES.values())
        client.close()


def test_caller_error_keeps_the_connection(client):
    """Whole answers: nothing of them is left in the connection."""
    first = ask(client, "CLIENT", "ID")
    for error in (ValueError, TypeError, LookupError, AttributeError):

        def fail(replies, error=error):
            raise error

        with pytest.raises(Unavailable, match=error.__name__):
            client.ask([pack("ECHO", "a")], fail)
    assert ask(client, "CLIENT", "ID") == first


def test_interrupted_command_drops_its_connection(client, monkeypatch):
    first = ask(client, "CLIENT", "ID")
    with monkeypatch.context() as patched:

        def interrupt(*_):
            raise KeyboardInterrupt

        patched.setattr(RedisConnection, "_receive", interrupt)
        with pytest.raises(KeyboardInterrupt):
            ask(client, "ECHO", "a")
    assert ask(client, "ECHO", "b") == b"b"
    assert ask(client, "CLIENT", "ID") != first


def test_threads_have_connections_of_their_own(client, other):
    num_threads, wrong = 6, []
    barrier = threading.Barrier(num_threads)

    def work(number: int) -> None:
        barrier.wait()
        for i in range(200):
            text = f"{number} {i}"
            if ask(client, "ECHO", text) != text.encode():
                wrong.append(text)

    in_threads(*(partial(work, number) for number in range(num_threads)))
    assert not wrong
    assert 1 <= num_connections(other) <= num_threads


def test_a_forked_child_has_connections_of_its_own(client, other):
    first = ask(client, "CLIENT", "ID")
    child = os.fork()
    if child == 0:
        try:
            is_own = ask(client, "CLIENT", "ID") != first and ask(client, "ECHO", 1) == b"1"
            client.close()
            os._exit(0 if is_own else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert ask(client, "CLIENT", "ID") == first
    eventually(lambda: num_connections(other) == 1, "the child's connection stays")


def test_client_reconnects_after_close(client, other):
    for _ in range(2):
        assert ask(client, "ECHO", "a") == b"a"  # it connects anew
        client.close()
        client.close()
        eventually(lambda: num_connections(other) == 0, "a connection stays")
