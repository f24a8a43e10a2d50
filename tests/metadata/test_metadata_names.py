"""Engines that find each other by their names on a server."""

import os
import socket
from functools import partial

import numpy as np
import pytest

from mooncake_kernels import __version__, metadata
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.metadata import Entry
from mooncake_kernels.transfer import TransferEngine

from ..threads import in_threads
from .support import engine_process, free_port, names, put_entry

SIZE = 1 << 16


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_engines_find_each_other(url, transport):
    with (
        TransferEngine("decode-1", metadata=url, transports=[transport, "tcp"]) as near,
        TransferEngine("prefill-3", metadata=url) as far,
        near.open("prefill-3") as peer,
    ):
        assert (near.name, far.name, peer.name) == ("decode-1", "prefill-3", "prefill-3")
        assert peer.transport == transport
        source = np.arange(SIZE, dtype=np.uint8)
        region, target = near.register(source), far.register(np.zeros(SIZE, np.uint8))
        row = (region.address, target.address, SIZE)
        near.write(peer, [row], notify=b"done").wait()
        np.testing.assert_array_equal(target._buffer.owner, source)
        assert far.receive_notifications(5) == [("decode-1", b"done")]
        assert near.stats()["peers"]["prefill-3"]["num_bytes_written"] == SIZE


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_engine_in_another_process_is_found_by_name(url, transport):
    with (
        TransferEngine(metadata=url, transports={transport, "tcp"}) as engine,
        engine_process(url, "prefill-3") as other,
    ):
        source, back = np.arange(SIZE, dtype=np.uint8), np.zeros(SIZE, np.uint8)
        here, there = engine.register(source), engine.register(back)
        peer = engine.open("prefill-3")
        assert peer.transport == transport
        engine.write(peer, [(here.address, other.region_address, SIZE)]).wait()
        engine.read(peer, [(there.address, other.region_address, SIZE)]).wait()
        np.testing.assert_array_equal(back, source)
        other.close()
        with pytest.raises(TransferError, match="has no such name"):
            engine.open("prefill-3")


def test_published_entry_contents(url):
    with metadata.connect(url) as directory:
        assert directory.lookup("b") is None
        assert directory.entries() == []
        with TransferEngine("b", metadata=url) as b, TransferEngine("a", metadata=url):
            entry = directory.lookup("b")
            assert (entry.name, entry.address, entry.protocol) == (
                "b",
                b.address,
                "mooncake_kernels",
            )
            assert entry.instance == b._engine.instance
            assert (entry.version, entry.host) == (__version__, socket.gethostname())
            assert (entry.pid, entry.segment) == (os.getpid(), None)
            assert [entry.name for entry in directory.entries()] == ["a", "b"]
        assert directory.entries() == []


def test_generated_names_are_unique(url):
    with TransferEngine(metadata=url) as first, TransferEngine(metadata=url) as second:
        assert first.name != second.name
        assert names(url) == sorted([first.name, second.name])
        assert first.open(second.name).name == second.name


def test_listen_address_is_published(url):
    listen = f"127.0.0.1:{free_port()}"
    with TransferEngine("a", metadata=url, listen=listen) as engine:
        assert engine.address == listen
    with TransferEngine("a", metadata=url) as engine:
        assert engine.address.startswith("127.0.0.1:")
    with TransferEngine("a", metadata=url, listen="[::1]:0") as engine:
        with TransferEngine(metadata=url, transports=["tcp"]) as other:
            assert engine.address.startswith("[::1]:")
            assert other.open("a").transport == "tcp"
    with TransferEngine() as p2p:
        assert p2p.address == p2p.name


def test_name_belongs_to_one_engine(url):
    with TransferEngine("a", metadata=url) as first:
        with pytest.raises(InvalidArgument) as caught:
            TransferEngine("a", metadata=url)
        for part in ("name must be free", "'a'", first.address, str(os.getpid())):
            assert part in str(caught.value)
        with metadata.connect(url) as directory:
            assert directory.lookup("a").instance == first._engine.instance
    TransferEngine("a", metadata=url).close()  # free again


def test_name_of_an_unresponsive_process_stays_taken(url, monkeypatch):
    monkeypatch.setattr("mooncake_kernels.transfer.names.PROBE_S", 0.2)
    with engine_process(url, "a") as other:
        other.stop()
        with pytest.raises(InvalidArgument, match=f"the engine at {other.address} has"):
            TransferEngine("a", metadata=url)


@pytest.mark.parametrize("stale", [False, True])
def test_one_of_several_racing_engines_gets_the_name(url, stale):
    if stale:
        put_entry(
            url, Entry("a", f"127.0.0.1:{free_port()}", instance=5, host=socket.gethostname())
        )

    def start(_):
        try:
            return TransferEngine("a", metadata=url)
        except InvalidArgument as error:
            return str(error)

    results = in_threads(*(partial(start, each) for each in range(8)))
    engines = [result for result in results if isinstance(result, TransferEngine)]
    assert len(engines) == 1
    assert all("name must be free" in text for text in results if isinstance(text, str))
    with metadata.connect(url) as directory:
        assert directory.lookup("a").instance == engines[0]._engine.instance
    engines[0].close()
    assert names(url) == []


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a b",
        "a/b",
        "a\n",
        "a\0",
        "\x1b[2J",
        "é",
        "名",
        "\ud800",
        "x" * 256,
        5,
        b"a",
        ["a"],
    ],
)
def test_invalid_names_are_rejected(url, name):
    with pytest.raises(InvalidArgument, match="TransferEngine: name must be 1 to 255 printable"):
        TransferEngine(name, metadata=url)
    with TransferEngine(metadata=url) as engine:
        with pytest.raises(InvalidArgument, match="open: name must be 1 to 255 printable ASCII"):
            engine.open(name)
    with metadata.connect(url) as directory:
        with pytest.raises(InvalidArgument, match="lookup: name must be 1 to 255 printable ASCII"):
            directory.lookup(name)
    assert names(url) == []


@pytest.mark.parametrize(
    "name",
    ["*", "?", "[a-z]", "a\\", "a\"b'c", "{}", "%2F", "%41", "..", "a&key=b", "a#b", "a+b", "p2p",
     "10.0.0.1:12345", "$(x)", "-1", "x" * 255],
)  # fmt: skip
def test_names_with_special_characters_are_literal(url, name):
    with TransferEngine("another", metadata=url), TransferEngine(name, metadata=url) as engine:
        assert names(url) == sorted(["another", name])
        assert engine.open("another").name == "another"
        assert engine.open(name).name == name
    assert names(url) == []


def test_prefixes_keep_clusters_apart(servers):
    for kind in ("redis", "http"):
        base = servers(kind).url
        with (
            TransferEngine("a", metadata=base),
            TransferEngine("a", metadata=f"{base}?prefix=mooncake/two/"),
            TransferEngine("a", metadata=f"{base}?prefix=*"),
        ):
            assert names(base) == names(f"{base}?prefix=*") == ["a"]
            assert names(f"{base}?prefix=moon") == []


def test_transports_and_listen_must_fit_the_server(url):
    with pytest.raises(
        InvalidArgument, match="transports must have tcp or rdma with a metadata server"
    ):
        TransferEngine("a", metadata=url, transports=["local"])
    with pytest.raises(InvalidArgument, match="listen must be None under p2p"):
        TransferEngine(listen="127.0.0.1:0")
    for listen in ("127.0.0.1", "0.0.0.0:0", "é:1", 5):
        with pytest.raises(InvalidArgument, match="TransferEngine: listen must be"):
            TransferEngine("a", metadata=url, listen=listen)
    assert names(url) == []


def test_p2p_cannot_list_entries():
    with metadata.connect("p2p") as p2p:
        assert p2p.lookup("10.0.0.1:80").address == "10.0.0.1:80"
        with pytest.raises(Unavailable, match="p2p has no list"):
            p2p.entries()
