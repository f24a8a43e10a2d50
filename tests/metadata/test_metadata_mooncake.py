"""Interoperation with Mooncake: its servers, which can do less, and its segments."""

import socket

import pytest

from mooncake_kernels import metadata
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.metadata import Entry, SegmentBuffer, SegmentDevice
from mooncake_kernels.metadata.entry import encode
from mooncake_kernels.transfer import TransferEngine

from .support import engine_process, eventually, free_port, put

RDMA = {
    "name": "node-1:12345", "protocol": "rdma", "tcp_data_port": 0, "timestamp": "2026-01-01",
    "devices": [
        {"name": "mlx5_0", "lid": 17, "gid": "fe:80:00"}, {"name": "mlx5_1", "lid": 0, "gid": "0a"},
    ],
    "buffers": [
        {"name": "cpu:0", "addr": 2**63, "length": 1 << 30, "rkey": [1, 2], "lkey": [3, 4]},
        {"name": "cuda:1", "addr": 4096, "length": 8, "rkey": [1, 2], "lkey": [3, 4]},
    ],
    "priority_matrix": {"cpu:0": [["mlx5_0"], ["mlx5_1"]], "cuda:1": [["mlx5_1"], []]},
}  # fmt: skip
RPC = {"ip_or_host_name": "10.0.0.1", "rpc_port": 12345}


def put_segment(url: str, name: str, segment: dict | None) -> None:
    put(url, name, RPC)
    if segment is not None:
        put(url, name, segment, segment=True)


def test_mooncake_segment_is_read_as_an_entry(url):
    put_segment(url, "node-1:12345", RDMA)
    with metadata.connect(url) as directory:
        [entry] = directory.entries()
        assert entry == directory.lookup("node-1:12345")
    assert (entry.name, entry.address) == ("node-1:12345", "10.0.0.1:12345")
    assert (entry.protocol, entry.instance, entry.pid) == ("rdma", 0, 0)
    assert entry.segment.buffers == (
        SegmentBuffer("cpu:0", 2**63, 1 << 30),
        SegmentBuffer("cuda:1", 4096, 8),
    )
    assert entry.segment.devices == (
        SegmentDevice("mlx5_0", 17, "fe:80:00"),
        SegmentDevice("mlx5_1", 0, "0a"),
    )
    assert entry.segment.topology == {
        "cpu:0": (("mlx5_0",), ("mlx5_1",)),
        "cuda:1": (("mlx5_1",), ()),
    }


@pytest.mark.parametrize(
    "segment, protocol, num_buffers",
    [
        ({"protocol": "tcp", "buffers": [{"name": "cpu:0", "addr": 1, "length": 2}]}, "tcp", 1),
        ({"protocol": ["tcp", "cxl"], "buffers": None, "priority_matrix": None}, "tcp,cxl", 0),
        ({"protocol": "cxl", "buffers": [{"name": "c", "offset": 0, "length": 2}]}, "cxl", 1),
        ({"protocol": "ub", "devices": [{"name": "ub0", "eid": "00:11"}]}, "ub", 0),
        ({"protocol": "nvmeof", "buffers": [{"file_path": "/x", "length": 2}]}, "nvmeof", 1),
        (None, "", None),
    ],
)
def test_segments_with_other_protocols(url, segment, protocol, num_buffers):
    put_segment(url, "a", segment)
    with metadata.connect(url) as directory:
        entry = directory.lookup("a")
    assert entry.protocol == protocol
    assert (None if entry.segment is None else len(entry.segment.buffers)) == num_buffers
    with TransferEngine(metadata=url) as engine:
        with pytest.raises(TransferError, match=r"10\.0\.0\.1:12345 speaks .* of Mooncake"):
            engine.open("a")
    with pytest.raises(InvalidArgument, match=r"the engine at 10\.0\.0\.1:12345 has \(Mooncake's"):
        TransferEngine("a", metadata=url)


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": 5}, {"protocol": None}, {"protocol": ["tcp", 5]}, {"buffers": 5},
        {"devices": {"a": 1}},
        {"buffers": [5]}, {"buffers": [{"addr": -1, "length": 1}]}, {"buffers": [{"addr": 1}]},
        {"buffers": [{"addr": 2**64, "length": 1}]}, {"devices": [{"lid": 2**16}]},
        {"priority_matrix": [1]}, {"priority_matrix": {"cpu:0": 5}},
        {"priority_matrix": {"cpu:0": [[5]]}}, {"protocol": "mooncake_kernels"},
    ],
)  # fmt: skip
def test_malformed_segments_are_rejected(url, change):
    put_segment(url, "a", {**RDMA, **change})
    with metadata.connect(url) as directory:
        with pytest.raises(Unavailable, match="a is no entry: "):
            directory.lookup("a")


def test_engines_at_a_mooncake_server(mooncake_url, short_ttl):
    with TransferEngine("a", metadata=mooncake_url) as a:
        with TransferEngine("b", metadata=mooncake_url) as b:
            assert b.open("a").transport == "local"
            with pytest.raises(InvalidArgument, match=f"the engine at {a.address} has"):
                TransferEngine("a", metadata=mooncake_url)
        with pytest.raises(TransferError, match="has no such name"):
            a.open("b")
        with metadata.connect(mooncake_url) as directory:
            key, value = directory._engines + "a", directory._store.get("mooncake/rpc_meta/a")
            directory._store.remove(key, b"another")
            assert directory.lookup("a").address == a.address
            directory._store.remove(key, value)
            eventually(lambda: directory.lookup("a"), "the entry does not come back")
            with pytest.raises(Unavailable, match="it has no list of its keys"):
                directory.entries()
    with metadata.connect(mooncake_url) as directory:
        assert directory.lookup("a") is None


def test_killed_engine_is_replaced_at_a_mooncake_server(mooncake_url):
    with engine_process(mooncake_url, "a") as other:
        other.kill()
    with TransferEngine("a", metadata=mooncake_url) as successor:
        with metadata.connect(mooncake_url) as directory:
            assert directory.lookup("a").instance == successor._engine.instance


def test_successor_is_not_overwritten_at_a_mooncake_server(mooncake_server, short_ttl, caplog):
    mooncake_url, held = mooncake_server.url, mooncake_server._server
    other = Entry("a", f"127.0.0.1:{free_port()}", instance=5, host=socket.gethostname())
    with TransferEngine("a", metadata=mooncake_url), metadata.connect(mooncake_url) as directory:
        with held.lock:  # by two requests of ours it might publish itself in between
            held.values["mooncake/rpc_meta/a"] = encode(other)
        eventually(lambda: "is another engine's by now" in caplog.text, "nothing is logged")
        assert directory.lookup("a") == other
    with metadata.connect(mooncake_url) as directory:
        assert directory.lookup("a") == other
