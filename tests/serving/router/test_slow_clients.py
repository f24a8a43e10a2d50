"""Clients that do not send, do not read, or send too much: they cost others nothing."""

import contextlib
import json
import socket
import threading
from http.client import HTTPConnection

import httpx
import pytest

from tests.serving.router.support import COUPLED, MODEL
from tests.waiting import eventually


def begun(router, num_announced: int, body: bytes = b""):
    """A connection that has sent the headers of a request, and a part of its body."""
    client = socket.create_connection(("127.0.0.1", router.server.port))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {num_announced}\r\n\r\n"
    client.sendall(head.encode() + body)
    return contextlib.closing(client)


def connected(router):
    client = socket.create_connection(("127.0.0.1", router.server.port))
    client.settimeout(30)
    return contextlib.closing(client)


def answer_to(client) -> bytes:
    """Read one answer, which is JSON."""
    answer = b""
    while not answer.endswith(b"}"):
        part = client.recv(4096)
        assert part, answer
        answer += part
    return answer


HEALTH = b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n"


@pytest.mark.parametrize("part", [b"", b"GET /hea", HEALTH[:-2]])
def test_a_connection_without_a_request_is_closed(cluster, part):
    router, _ = cluster({"both": "both"}, client_s=0.5)
    with connected(router) as client:
        client.sendall(part)
        assert client.recv(100) == b""


def test_a_header_that_comes_byte_by_byte_has_no_more_time(cluster):
    router, _ = cluster({"both": "both"}, client_s=0.5)
    with connected(router) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nX: ")
        client.settimeout(0.05)
        with contextlib.suppress(ConnectionError):
            for _ in range(400):
                client.sendall(b"a")
                with contextlib.suppress(TimeoutError):
                    if not client.recv(100):
                        return
    pytest.fail("the connection stays")


def test_a_later_request_of_a_connection_has_the_same_deadline(cluster):
    router, _ = cluster({"both": "both"}, client_s=0.5)
    with connected(router) as client:
        client.sendall(HEALTH + HEALTH[:20])
        assert answer_to(client).startswith(b"HTTP/1.1 200 ")
        client.sendall(HEALTH[20:30])
        assert client.recv(4096) == b""


def test_a_body_that_comes_after_its_answer_has_a_deadline(cluster):
    router, _ = cluster({"both": "both"}, client_s=0.5)
    with connected(router) as client:
        client.sendall(b"POST /health HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n")
        assert answer_to(client).startswith(b"HTTP/1.1 405 ")
        client.sendall(b"a")
        assert client.recv(4096) == b""


def test_a_client_that_waits_or_is_idle_keeps_its_connection(cluster):
    router, engines = cluster({"both": "both"}, client_s=0.2)
    engines["both"].gate.clear()
    timer = threading.Timer(1.0, engines["both"].gate.set)
    timer.start()
    assert router.complete("abc").status_code == 200
    timer.join()
    with contextlib.closing(HTTPConnection("127.0.0.1", router.server.port)) as client:
        for _ in range(2):
            client.request("GET", "/health")
            assert client.getresponse().read() == b'{"status":"ok"}'
            client.sock.settimeout(1.0)
            with pytest.raises(TimeoutError):
                client.sock.recv(1)  # it stays open
            client.sock.settimeout(30)


@pytest.mark.parametrize("body", [b"", b'{"model": "llama",'])
def test_a_body_that_does_not_come_is_given_up(cluster, body):
    router, _ = cluster({"both": "both"}, client_s=2.0, max_requests=1)
    with begun(router, 1000, body) as client:
        client.settimeout(30)
        assert router.complete("abc").status_code == 200  # it counts for no request under way
        answer = b"".join(iter(lambda: client.recv(4096), b""))  # to the connection's end
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_slow"
    assert router.router.bodies.num_bytes == 0


def test_bodies_have_limited_memory_together(cluster):
    router, _ = cluster({"both": "both"}, max_body_bytes=4000, max_held_bytes=4000)
    with begun(router, 3500, b"a" * 3000):
        eventually(lambda: router.router.bodies.num_bytes == 3000)
        assert router.complete("a" * 500).status_code == 200
        refused = router.complete("a" * 1500)
        assert refused.status_code == 429 and refused.headers["retry-after"] == "1"
        assert "too much memory" in refused.json()["error"]["message"]
    eventually(lambda: router.router.bodies.num_bytes == 0)
    assert router.complete("a" * 1500).status_code == 200


def test_a_client_that_does_not_read_is_given_up(cluster):
    router, engines = cluster({"both": "both"}, client_s=2.0, max_requests=1)
    engines["both"].padding = 1 << 16
    body = json.dumps({"model": MODEL, "prompt": "abc", "max_tokens": 1000, "stream": True})
    with begun(router, len(body), body.encode()):
        eventually(lambda: router.get("/decisions")["decisions"])
        outcome = eventually(lambda: router.last().get("outcome"))
        # Whichever deadline comes first, that of the router or that of its socket.
        assert outcome in ("the client has read nothing for 2 s", "the client has left")
        assert router.instance("both")["decoding"] == 0
        assert router.complete("abc", max_tokens=1).status_code == 200
        eventually(lambda: router.server.num_connections == 1)  # that of ``router.client``


def test_an_unforeseen_error_counts_as_500(cluster, monkeypatch):
    router, _ = cluster(COUPLED)
    monkeypatch.setattr(router.router.placement, "place", None)
    answer = router.complete("abc")
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
    # On a connection of its own: uvicorn closes the other one after such an error.
    lines = httpx.get(f"http://127.0.0.1:{router.server.port}/metrics").text.splitlines()
    counted = [line for line in lines if line.startswith("mooncake_router_requests_total")]
    assert len(counted) == 1 and 'status="500"' in counted[0]
