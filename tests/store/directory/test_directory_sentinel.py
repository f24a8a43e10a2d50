"""Redis's own failover: a sentinel makes a replica the master, and clients find it."""

import subprocess

import pytest
import redis
from redis._parsers import _RESP2Parser

from mooncake_kernels import metadata
from mooncake_kernels.errors import Unavailable
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.store.directory import Member, connect

from ...metadata.support import eventually, reserved_port
from .support import LONG_S, keys

A = Member("a", "host 1", "pool 1")
PASSWORD = "s3cr3t"
CONFIGURATION = """
port {port}
bind 127.0.0.1
dir {folder}
sentinel monitor kv 127.0.0.1 {master} 1
sentinel auth-pass kv {password}
sentinel down-after-milliseconds kv 60000
sentinel failover-timeout kv 5000
"""


@pytest.fixture
def servers(start):
    """A master and its replica."""
    first, second = (start("--requirepass", PASSWORD, "--masterauth", PASSWORD) for _ in range(2))
    with redis.Redis(port=second.port, password=PASSWORD) as replica:
        replica.replicaof("127.0.0.1", str(first.port))
        eventually(lambda: replica.info()["master_link_status"] == "up", "no replica")
    return first, second


@pytest.fixture
def sentinel(tmp_path, servers):
    """A sentinel, which is alone to decide: a client of it."""
    holding, path = reserved_port(), tmp_path / "sentinel.conf"
    port = holding.getsockname()[1]
    path.write_text(
        CONFIGURATION.format(port=port, folder=tmp_path, master=servers[0].port, password=PASSWORD)
    )
    process = subprocess.Popen(
        [servers[0].program, str(path), "--sentinel"], stdout=subprocess.DEVNULL
    )
    client = redis.Redis(port=port)

    def knows_the_replica() -> bool:
        try:
            return len(client.sentinel_slaves("kv")) == 1
        except redis.ConnectionError:
            return False

    try:
        eventually(knows_the_replica, "the sentinel does not find the replica")
        yield client
    finally:
        client.close()
        process.kill()
        process.wait()
        holding.close()


def port_of(sentinel: redis.Redis) -> int:
    return sentinel.connection_pool.connection_kwargs["port"]


def test_sentinel_failover(servers, sentinel):
    holding = reserved_port()  # where no one listens
    nobody = holding.getsockname()[1]
    shown = f"redis+sentinel://127.0.0.1:{nobody},127.0.0.1:{port_of(sentinel)}/kv"
    with connect(shown.replace("//", f"//:{PASSWORD}@") + "?db=1") as directory:
        directory.join(A, LONG_S)
        directory.publish("pool 1", keys(1))
        with redis.Redis(port=servers[1].port, db=1, password=PASSWORD) as replica:
            eventually(lambda: replica.exists("{mooncake}:members"), "nothing was replicated")
        servers[0].stop()
        with pytest.raises(Unavailable, match="127.0.0.1") as caught:
            directory.members()
        assert shown in str(caught.value) and PASSWORD not in str(caught.value)
        sentinel.sentinel_set("kv", "down-after-milliseconds", 1000)

        def is_back() -> bool:
            try:
                return directory.members() == [A]
            except Unavailable:
                return False

        eventually(is_back, "no failover")
        sentinel.sentinel_set("kv", "down-after-milliseconds", 60_000)
        assert not directory.renew(A, LONG_S)
        directory.join(A, LONG_S)
        directory.publish("pool 1", keys(1, 2))
        assert directory.renew(A, LONG_S) and len(directory.match_prefix(keys(1, 2))) == 2
    holding.close()


def test_master_demoted_to_replica_is_abandoned(servers, sentinel):
    """It still answers, and closes nothing: a connection to it is left at the first refusal."""
    url = f"redis+sentinel://:{PASSWORD}@127.0.0.1:{port_of(sentinel)}/kv"
    with (
        redis.Redis(port=servers[0].port, password=PASSWORD) as old,
        redis.Redis(port=servers[1].port, password=PASSWORD) as new,
        connect(url) as directory,
    ):
        directory.join(A, LONG_S)
        new.replicaof("no", "one")
        old.replicaof("127.0.0.1", str(servers[1].port))
        sentinel.sentinel_remove("kv")
        sentinel.sentinel_monitor("kv", "127.0.0.1", servers[1].port, 1)
        sentinel.sentinel_set("kv", "auth-pass", PASSWORD)
        with pytest.raises(Unavailable, match="read only replica"):
            directory.join(A, LONG_S)
        directory.join(A, LONG_S)
        directory.publish("pool 1", keys(1))
        assert new.exists(b"{mooncake}:o" + keys(1).tobytes())


def test_engines_find_each_other_through_sentinel(servers, sentinel):
    url = f"redis+sentinel://:{PASSWORD}@127.0.0.1:{port_of(sentinel)}/kv"
    with TransferEngine("a", metadata=url), TransferEngine("b", metadata=url) as engine:
        assert engine.open("a").name == "a"
        with metadata.connect(url) as directory:
            assert [entry.name for entry in directory.entries()] == ["a", "b"]


def test_unknown_sentinel_service_is_reported(servers, sentinel):
    with connect(f"redis+sentinel://127.0.0.1:{port_of(sentinel)}/other") as directory:
        with pytest.raises(Unavailable, match="No master found for 'other'"):
            directory.members()


def test_no_server_is_read_by_hiredis(servers, sentinel):
    """redis-py chooses it where it is installed; it would trust the sizes in a reply."""
    url = f"redis+sentinel://:{PASSWORD}@127.0.0.1:{port_of(sentinel)}/kv"
    with connect(url) as directory:
        directory.members()
        pool = directory._client._pool
        pools = [pool, *(server.connection_pool for server in pool.sentinel_manager.sentinels)]
        for each in pools:
            assert isinstance(each.get_connection()._parser, _RESP2Parser)
