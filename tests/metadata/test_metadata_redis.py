"""Specific to Redis: passwords, TLS, databases, Unix sockets, other types, foreign keys."""

import pytest
import redis

from mooncake_kernels import metadata
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.transfer import TransferEngine

from .support import PROGRAMS, RedisServer, names

PASSWORD = "s3cr3t/!@#"
QUOTED = "s3cr3t%2F%21%40%23"


@pytest.fixture(scope="module", params=PROGRAMS)
def plain(request, tmp_path_factory):
    program = PROGRAMS[request.param]()
    server = RedisServer(tmp_path_factory.mktemp("redis"), program=program)
    yield server
    server.stop()


def works(url: str) -> None:
    with TransferEngine("a", metadata=url), TransferEngine("b", metadata=url) as engine:
        assert engine.open("a").name == "a"
        assert names(url) == ["a", "b"]
    assert names(url) == []


def test_redis_databases_and_unix_socket(plain):
    with TransferEngine("a", metadata=plain.url):
        assert names(f"redis://127.0.0.1:{plain.port}") == ["a"]
        assert names(f"unix://{plain.folder}/redis.sock") == ["a"]
        assert names(f"redis://127.0.0.1:{plain.port}/1") == []
        assert names(f"unix://{plain.folder}/redis.sock?db=1") == []
    works(f"unix://{plain.folder}/redis.sock?db=1")


def test_redis_password(tmp_path):
    server = RedisServer(tmp_path, "--requirepass", PASSWORD)
    try:
        works(f"redis://:{QUOTED}@127.0.0.1:{server.port}/0")
        works(f"redis://default:{QUOTED}@127.0.0.1:{server.port}/0")
        works(f"unix://{tmp_path}/redis.sock?password={QUOTED}")
        for login in ("", ":wrong@", "nobody:wrong@"):
            with pytest.raises(Unavailable, match=f"redis://127.0.0.1:{server.port}/0: ") as caught:
                TransferEngine(metadata=f"redis://{login}127.0.0.1:{server.port}/0")
            assert "wrong@" not in str(caught.value)
    finally:
        server.stop()


def test_redis_over_tls(tls_url):
    works(tls_url)
    bare = tls_url.split("?")[0]
    with pytest.raises(Unavailable, match="CERTIFICATE_VERIFY_FAILED"):
        names(bare)
    with pytest.raises(Unavailable):
        names(bare.replace("rediss", "redis"))


def test_redis_keys_expire(plain):
    client = redis.Redis(port=plain.port)
    with TransferEngine("a", metadata=plain.url):
        assert client.keys() == [b"mooncake/rpc_meta/a"]
        assert 0 < client.pttl("mooncake/rpc_meta/a") <= 15_000
    client.close()


def test_foreign_redis_keys_are_ignored(plain):
    client = redis.Redis(port=plain.port)
    client.mset({f"other{i}": b"x" for i in range(5000)})
    client.mset({f"mooncake/rpc_meta/{i}": b"x" for i in (b"\xff", "é", "a b")})
    client.hset("mooncake/rpc_meta/hash", "a", "b")
    with (
        metadata.connect(plain.url) as directory,
        TransferEngine("a", metadata=plain.url) as engine,
    ):
        assert [entry.name for entry in directory.entries()] == ["a"]
        with pytest.raises(Unavailable, match="hash is no entry: it must be a string"):
            directory.lookup("hash")
        with pytest.raises(Unavailable, match="hash is no entry"):
            TransferEngine("hash", metadata=plain.url)
        client.flushdb()
        with pytest.raises(TransferError, match="no such name"):
            engine.open("a")
    client.close()


def test_lost_redis_connection_is_reopened(plain):
    with TransferEngine("a", metadata=plain.url) as engine:
        client = redis.Redis(port=plain.port)
        for _ in range(3):
            client.client_kill_filter(_type="normal", skipme=True)
            assert engine.open("a").name == "a"
        client.close()


def test_read_only_redis_is_reported(plain):
    client = redis.Redis(port=plain.port)
    client.replicaof("127.0.0.1", "1")
    try:
        with pytest.raises(Unavailable, match="read only replica"):
            TransferEngine("a", metadata=plain.url)
    finally:
        client.replicaof("no", "one")
        client.close()
    works(plain.url)
    with TransferEngine("a", metadata=plain.url):
        with pytest.raises(InvalidArgument, match="name must be free"):
            TransferEngine("a", metadata=plain.url)
