"""Servers that are killed, lose their data, come back, or never answer."""

import contextlib
import logging
import socket
import threading
import time

import pytest

from mooncake_kernels import config, metadata
from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.metadata.entry import encode
from mooncake_kernels.transfer import TransferEngine

from .support import TTL_S, eventually, impatience, names, raw_server, urls_at

pytestmark = pytest.mark.usefixtures("short_ttl")


@pytest.fixture
def log(caplog):
    caplog.set_level(logging.WARNING)
    return lambda: [record.getMessage() for record in caplog.records]


def keepers() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("keep ")]


def finds_itself(engine: TransferEngine) -> bool:
    """Where a refresh is late, its entry may be gone for a moment."""
    with contextlib.suppress(TransferError):
        return engine.open("a").transport == "local"
    return False


def test_name_lives_as_long_as_its_engine(url, log):
    ttl_s = 4.5  # so that a refresh may be late by 3 s
    with config.override(metadata_ttl_s=ttl_s), TransferEngine("a", metadata=url):
        assert len(keepers()) == 1
        until = time.monotonic() + 1.2 * ttl_s
        while time.monotonic() < until:
            assert names(url) == ["a"]
            time.sleep(0.2)
    assert keepers() == []
    assert log() == []


def test_entry_is_republished_after_data_loss(server, log):
    with TransferEngine("a", metadata=server.url) as engine:
        for _ in range(2):
            num_before = len(log())
            server.stop()
            eventually(lambda num=num_before: len(log()) > num, "nothing is logged")
            time.sleep(TTL_S)
            server.start()
            eventually(lambda: names(server.url) == ["a"], "the entry does not come back")
            eventually(lambda num=num_before: len(log()) > num + 1, "nothing is logged")
            away, back = log()[num_before:]
            assert away.startswith("mooncake/rpc_meta/a cannot be refreshed: metadata server")
            assert back == "mooncake/rpc_meta/a is published again"
        eventually(lambda: finds_itself(engine), "it does not find itself")
    assert names(server.url) == []


def test_name_taken_over_by_another_engine_is_given_up(url, log):
    key = metadata.connect(url)._engines + "a"
    other = metadata.Entry("a", "127.0.0.1:1", instance=5, host=socket.gethostname())
    with TransferEngine("a", metadata=url), metadata.connect(url) as tool:

        def takes_over():
            held = tool._store.get(key)
            return held is not None and tool._store.replace(key, held, encode(other), 60_000)

        eventually(takes_over, "it is not there")
        eventually(lambda: log() == [f"{key} is another engine's by now"], "nothing is logged")
        assert tool.lookup("a") == other
    with metadata.connect(url) as tool:
        assert tool.lookup("a") == other, "closing removed what is another's"


def test_unreachable_server_is_reported(server):
    with TransferEngine("a", metadata=server.url) as engine, metadata.connect(server.url) as tool:
        server.stop()
        for call in (
            lambda: TransferEngine("b", metadata=server.url),
            lambda: engine.open("a"),
            lambda: tool.lookup("a"),
            lambda: tool.entries(),
        ):
            with pytest.raises(Unavailable, match=f"metadata server {server.url}: .*refused"):
                call()
    assert keepers() == []


def never(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.recv(1)  # until the other side has enough


def drip(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n$1000000\r\n")
    while True:
        connection.sendall(b"x")
        time.sleep(0.05)


@pytest.mark.parametrize("kind", [0, 1], ids=["redis", "http"])
@pytest.mark.parametrize("behave", [never, drip])
def test_unresponsive_server_is_reported(kind, behave, impatient):
    with raw_server(behave) as port:
        url = urls_at(port)[kind]
        with pytest.raises(Unavailable, match=f"metadata server {url}: "):
            TransferEngine("a", metadata=url)
        with metadata.connect(url) as tool:
            for call in (lambda: tool.lookup("a"), lambda: tool.entries()):
                with pytest.raises(Unavailable, match=f"metadata server {url}: "):
                    call()
    assert keepers() == []


@pytest.mark.parametrize("server", ["redis"], indirect=True)
def test_server_that_freezes_is_logged_and_recovered_from(server, log):
    with TransferEngine("a", metadata=server.url) as engine:
        server.freeze()
        with impatience():
            eventually(lambda: log(), "nothing is logged")
            with pytest.raises(Unavailable):
                engine.open("a")
        server.thaw()
        eventually(lambda: "is published again" in log()[-1], "nothing is logged")
        eventually(lambda: finds_itself(engine), "it does not find itself")
        server.freeze()
        with impatience():
            engine.close()
    assert f"stays for up to {TTL_S:g} s: metadata server" in log()[-1]
    assert keepers() == []
    server.thaw()
    eventually(lambda: names(server.url) == [], "the entry stays")


@pytest.mark.parametrize("body", [b"{}", b"[]"])
def test_truncated_http_answer_is_rejected(body):
    def behave(connection):
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + body)

    with raw_server(behave) as port, metadata.connect(urls_at(port)[1]) as directory:
        for ask in (lambda: directory.lookup("a"), directory.entries):
            with pytest.raises(Unavailable, match="2 bytes read, 97 more expected"):
                ask()
