"""Whatever a server says or holds, the result is an entry or a one-line error, and soon."""

import dataclasses
import json
import logging
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels import metadata
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.metadata import Entry, bounded_socket
from mooncake_kernels.metadata.entry import decode, decode_segment, encode
from mooncake_kernels.metadata.untrusted import MAX_VALUE_BYTES, Malformed
from mooncake_kernels.transfer import TransferEngine

from .support import put, raw_server, urls_at

GOOD = json.loads(encode(Entry("a", "10.0.0.1:80", instance=5, version="0.1.0", host="n", pid=7)))
MALFORMED = [
    b"x", b"\xff\xfe", b"[]", b"5", b"null", b"{}", b'"text"', b"[" * 100_000, b'{"a":' * 50_000,
    b"1" * 5000, b"",
    *(json.dumps({**GOOD, **change}).encode() for change in (
        {"ip_or_host_name": None}, {"ip_or_host_name": ""}, {"ip_or_host_name": "a b"},
        {"ip_or_host_name": "x" * 241}, {"ip_or_host_name": "a%b"}, {"ip_or_host_name": "a\n"},
        {"ip_or_host_name": ["10.0.0.1"]}, {"rpc_port": 0}, {"rpc_port": 65536},
        {"rpc_port": "80"}, {"rpc_port": 80.0}, {"rpc_port": True}, {"rpc_port": -1},
        {"rpc_port": 10**30}, {"instance": 5}, {"instance": "0" * 16}, {"instance": "5"},
        {"instance": "G" * 16}, {"instance": "٣" * 16}, {"pid": -1}, {"pid": "7"},
    )),
]  # fmt: skip


def attempt(call, errors):
    """What it returns; None for an error of one line."""
    try:
        return call()
    except errors as error:
        text = str(error)
    assert text.isascii() and text.isprintable() and len(text) < 500
    return None


@pytest.mark.parametrize("value", MALFORMED, ids=lambda value: repr(value[:40]))
def test_malformed_entries_are_rejected(url, value, caplog):
    caplog.set_level(logging.WARNING)
    put(url, "bad", value)
    put(url, "good", GOOD)
    with metadata.connect(url) as directory, TransferEngine(metadata=url) as engine:
        for call in (lambda: directory.lookup("bad"), lambda: engine.open("bad")):
            with pytest.raises(Unavailable, match="bad is no entry: ") as caught:
                call()
            assert str(caught.value).isprintable() and len(str(caught.value)) < 400
        assert [entry.name for entry in directory.entries()] == ["good", engine.name]
        assert any("left out: " in record.getMessage() for record in caplog.records)
        with pytest.raises(Unavailable, match="bad is no entry"):
            TransferEngine("bad", metadata=url)


def test_oversized_value_is_rejected(url):
    put(url, "a", b" " * MAX_VALUE_BYTES)
    with metadata.connect(url) as directory:
        with pytest.raises(Unavailable, match="is no entry: it must be JSON"):
            directory.lookup("a")
    if url.startswith("redis"):
        put(url, "b", b" " * (MAX_VALUE_BYTES + 1))
        with metadata.connect(url) as directory:
            with pytest.raises(Unavailable, match="it must be at most 16777216 bytes"):
                directory.lookup("b")


def test_keys_with_invalid_names_are_not_listed(url):
    for name in ("a b", "x" * 300, "\x1b[31m", "c/d"):
        put(url, name, GOOD)
    with metadata.connect(url) as directory:
        assert directory.entries() == []


def test_entry_text_is_sanitized():
    entry = decode("a", json.dumps({**GOOD, "version": "\x1b[2Jé\n", "host": "x" * 999}).encode())
    assert (entry.version, entry.host) == ("?[2J??", "x" * 255)
    assert decode("a", json.dumps({**GOOD, "version": 5, "host": None}).encode()).version == ""


@pytest.mark.parametrize("host", ["10.0.0.1", "node-7.example", "::1", "fe80::1%eth0"])
def test_entry_round_trips(host):
    address = f"[{host}]:80" if ":" in host else f"{host}:80"
    entry = Entry("a", address, instance=2**64 - 1, version="1", host="n", pid=1)
    assert decode("a", encode(entry)) == entry


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
FIELDS = st.sampled_from([*GOOD, "devices", "buffers", "priority_matrix", "name"])
BUFFERS = st.lists(st.dictionaries(st.sampled_from(["name", "addr", "length", "offset"]), JSON))


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(FIELDS, JSON | BUFFERS), st.booleans())
def test_any_json_is_an_entry_or_malformed(changes, keep):
    value = json.dumps({**(GOOD if keep else {}), **changes}).encode()
    for read in (lambda: decode("a", value), lambda: decode_segment(value)):
        result = attempt(read, Malformed)
        assert result is None or str(dataclasses.asdict(result)).isascii()


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64))
def test_any_bytes_are_malformed(value):
    for read in (lambda: decode("a", value), lambda: decode_segment(value)):
        with pytest.raises(Malformed):
            read()


REDIS_WORDS = [
    b"$-1\r\n", b"$5\r\nhello\r\n", b"*2\r\n", b":7\r\n", b"+OK\r\n", b"-ERR no\r\n", b"*-1\r\n",
    b"$99999999999\r\n", b"*99999999\r\n", b"$x\r\n", b":\r\n", b"*1\r\n" * 3000, b"\r\n",
    b"%1\r\n", b">1\r\n", b"$-5\r\n", b"\xff\xfe", b"-MOVED 1 10.0.0.1:1\r\n", b"-LOADING\r\n",
    b"-WRONGTYPE\r\n",
]  # fmt: skip
HTTP_WORDS = [
    b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/9.9 999 \x1b[2J\r\n", b"\r\n",
    b"Content-Length: 99999999999999\r\n", b"Content-Length: -1\r\n", b"Content-Length: x\r\n",
    b"Transfer-Encoding: chunked\r\n", b"-1\r\n", b"ffffffffffff\r\n", b"0\r\n\r\n", b"{}", b"[1]",
    b"a: b\r\n" * 200, b"x" * 70_000, b"HTTP/1.1 404 \r\n\r\n",
    b"HTTP/1.1 301 OK\r\nLocation: /\r\n\r\n",
]  # fmt: skip


@pytest.mark.parametrize("kind", [0, 1], ids=["redis", "http"])
@pytest.mark.parametrize("seed", range(40))
def test_garbage_from_the_server_is_reported(kind, seed, impatient):
    chance = random.Random(seed)
    words = [REDIS_WORDS, HTTP_WORDS][kind]

    def behave(connection):
        while connection.recv(1 << 16):
            connection.sendall(b"".join(chance.choices(words, k=chance.randint(1, 5))))
            if kind == 1:
                return

    with raw_server(behave) as port, metadata.connect(urls_at(port)[kind]) as directory:
        assert not attempt(directory.entries, Unavailable)
        assert attempt(lambda: directory.lookup("a"), Unavailable) is None
        engine = attempt(lambda: TransferEngine("a", metadata=urls_at(port)[kind]), Unavailable)
        if engine is not None:  # "OK", it said
            engine.close()


@pytest.mark.parametrize("kind", [0, 1], ids=["redis", "http"])
@pytest.mark.parametrize("start", [b"", b"$2000000000\r\n", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_endless_answer_is_cut_off(kind, start, monkeypatch):
    monkeypatch.setattr(bounded_socket, "MAX_BYTES", 1 << 20)

    def behave(connection):
        connection.recv(1 << 16)
        connection.sendall(start)
        while True:
            connection.sendall(b"x" * 65536)

    with raw_server(behave) as port, metadata.connect(urls_at(port)[kind]) as directory:
        with pytest.raises(Unavailable, match=f"metadata server .*:{port}"):
            directory.lookup("a")


def test_unresolvable_address_is_reported(url):
    put(url, "a", {**GOOD, "ip_or_host_name": "no-such-host.invalid"})
    with TransferEngine(metadata=url) as engine:
        with pytest.raises(Unavailable, match="cannot resolve no-such-host.invalid"):
            engine.open("a")
        with pytest.raises(InvalidArgument, match="name must be free"):
            TransferEngine("a", metadata=url)
    put(url, "b", {**GOOD, "ip_or_host_name": "127.0.0.1", "rpc_port": 1})
    with TransferEngine(metadata=url) as engine:
        with pytest.raises(TransferError, match="connection refused"):
            engine.open("b")
