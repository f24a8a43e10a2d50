"""Engines that find each other by name in Redis, or in a server of Mooncake's HTTP form."""

import contextlib
import subprocess
import sys

import numpy as np
import pytest

from mooncake_kernels import metadata
from mooncake_kernels.errors import Unavailable
from mooncake_serving.compat.mooncake import TransferEngine, TransferNotify, TransferOpcode, names

from ..metadata.support import HttpServer, MooncakeServer, RedisServer, eventually, free_port
from .support import SIZE, addressed, refused, untouched

VARIABLES = (
    "FORCE_TCP",
    "METADATA_CLUSTER_ID",
    "REDIS_USERNAME",
    "REDIS_PASSWORD",
    "REDIS_DB_INDEX",
)


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(f"MC_{name}", raising=False)


@contextlib.contextmanager
def command():
    """``python -m mooncake_kernels metadata``, as users start it."""
    port = free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port)]
    process = subprocess.Popen([sys.executable, "-m", "mooncake_kernels", "metadata", *arguments])
    url = f"http://127.0.0.1:{port}/metadata"
    try:
        eventually(lambda: answers(url), "the server does not answer")
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    with metadata.connect(url) as directory:
        try:
            return directory.lookup("nobody") is None
        except Unavailable:
            return False


@pytest.fixture(params=["redis", "command", "mooncake"])
def server(request, tmp_path):
    """The URL of a server, of each kind in turn."""
    with contextlib.ExitStack() as stack:
        if request.param == "command":
            yield stack.enter_context(command())
            return
        if request.param == "redis":
            running = RedisServer(tmp_path)
        else:
            running = HttpServer(lambda port: MooncakeServer(port, same_again=False))
        stack.callback(running.stop)
        yield running.url


@contextlib.contextmanager
def started(name: str, url: str):
    with contextlib.closing(TransferEngine()) as engine:
        assert engine.initialize(name, url, "tcp", "") == 0
        yield engine


def test_two_engines(server):
    near_memory, far_memory = addressed(SIZE), untouched(SIZE)
    near_address, far_address = near_memory.ctypes.data, far_memory.ctypes.data
    with started("127.0.0.1", server) as near, started("localhost", server) as far:
        assert (near.get_engine().name, far.get_engine().name) == ("127.0.0.1", "localhost")
        assert near.register_memory(near_address, SIZE) == 0
        assert far.register_memory(far_address, SIZE) == 0
        assert near.send_probe("localhost") == 0
        assert near.get_first_buffer_address("localhost") == far_address
        block = ("localhost", near_address, far_address, SIZE, TransferOpcode.Write)
        assert near.transfer_sync(*block, TransferNotify("name", "msg")) == 0
        np.testing.assert_array_equal(far_memory, near_memory)
        assert far.get_notifies() == [TransferNotify("name", "msg")]
        with metadata.connect(server) as directory:
            assert directory.lookup("localhost").address == f"localhost:{far.get_rpc_port()}"


def test_absent_names_and_a_taken_one(server, caplog):
    with started("127.0.0.1", server) as near:
        refused(caplog, -102, "has no such name", near.send_probe, "prefill-3")
        other = TransferEngine()
        arguments = ("127.0.0.1", server, "tcp", "")
        refused(caplog, -1, "name must be free", other.initialize, *arguments)
        near.close()
        assert other.initialize(*arguments) == 0
        other.close()


def test_port_in_the_name_is_used_if_free(server, caplog):
    port = free_port()
    name = f"127.0.0.1:{port}"
    with started(name, server) as engine, started(f"localhost:{port}", server) as other:
        assert engine.get_rpc_port() == port != other.get_rpc_port()
        assert f"localhost:{port} is taken" in caplog.text
        assert other.send_probe(name) == engine.send_probe(f"localhost:{port}") == 0


def test_cluster_ids_separate_names_on_one_server(server, monkeypatch, caplog):
    with started("127.0.0.1", server) as one:
        monkeypatch.setenv("MC_METADATA_CLUSTER_ID", "other")
        with started("127.0.0.1", server) as another, started("localhost", server) as its_peer:
            assert its_peer.send_probe("127.0.0.1") == 0
            refused(caplog, -102, "has no such name", one.send_probe, "localhost")
            with metadata.connect(f"{server}?prefix=mooncake/other/") as directory:
                entry = directory.lookup("127.0.0.1")
            assert entry.instance == another.get_engine()._engine.instance


def test_initialize_ext_with_redis_credentials(tmp_path, monkeypatch, caplog):
    server = RedisServer(tmp_path, "--requirepass", "pass/word")
    try:
        with contextlib.closing(TransferEngine()) as engine:
            arguments = ("127.0.0.1", f"127.0.0.1:{server.port}", "tcp", "", "redis")
            refused(caplog, -1, "metadata server redis://", engine.initialize_ext, *arguments)
            monkeypatch.setenv("MC_REDIS_PASSWORD", "pass/word")
            monkeypatch.setenv("MC_REDIS_DB_INDEX", "3")
            assert engine.initialize_ext(*arguments) == 0
            url = f"redis://:pass%2Fword@127.0.0.1:{server.port}/3"
            with metadata.connect(url) as directory:
                assert [entry.name for entry in directory.entries()] == ["127.0.0.1"]
            assert "pass/word" not in caplog.text
    finally:
        server.stop()


@pytest.mark.parametrize(
    "url, variables, expected",
    [
        ("redis://h:1", {}, "redis://h:1"),
        ("redis://h:1", {"MC_REDIS_PASSWORD": "a b"}, "redis://h:1?password=a+b"),
        ("redis://:x@h:1", {"MC_REDIS_PASSWORD": "a", "MC_REDIS_USERNAME": "u"}, "redis://:x@h:1"),
        ("redis://h:1/2", {"MC_REDIS_DB_INDEX": "5"}, "redis://h:1/2"),
        ("redis://h:1/", {"MC_REDIS_DB_INDEX": "5"}, "redis://h:1/?db=5"),
        ("http://h/metadata", {"MC_REDIS_PASSWORD": "a"}, "http://h/metadata"),
        (
            "http://h/metadata",
            {"MC_METADATA_CLUSTER_ID": "c/"},
            "http://h/metadata?prefix=mooncake%2Fc%2F",
        ),
        ("P2PHANDSHAKE", {"MC_METADATA_CLUSTER_ID": "c"}, "p2p"),
    ],
)
def test_settings_from_the_environment(url, variables, expected):
    assert names.metadata_of(url, environ=variables) == expected
