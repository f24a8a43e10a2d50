"""Which store a URL opens, and what is said of a URL that is wrong."""

import os
import subprocess
import sys

import pytest
import redis

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import PutResult
from mooncake_serving.connectors.store_url import open_store, parse_store_url
from mooncake_serving.store import ClusterStore, Store, TieredStore
from mooncake_serving.store.directory import connect
from tests.metadata.support import RedisServer

MIB = 1 << 20


def test_shm_url_names_a_pool_that_processes_share(tmp_path):
    url = f"shm:{tmp_path}/kv?size=8MiB"
    with open_store(url, namespace="m") as first, open_store(url, namespace="m") as second:
        assert type(first) is Store and first.pool.capacity_bytes == 8 * MIB
        first.put(1, b"one")
        assert second.get(1) == b"one"
        with open_store(url, namespace="n") as other:
            assert other.get(1) is None


def test_pool_that_exists_needs_no_size_and_keeps_its_own(tmp_path, caplog):
    path = f"{tmp_path}/kv"
    with open_store(f"shm:{path}?size=8MiB"):
        pass
    with open_store(f"shm:{path}") as store:
        assert store.pool.capacity_bytes == 8 * MIB
    assert "changes nothing" not in caplog.text
    with open_store(f"shm:{path}?size=16MiB") as store:
        assert store.pool.capacity_bytes == 8 * MIB
    assert "is there and has 8388608 bytes: 16777216 changes nothing" in caplog.text


def tiered_url(folder, **options):
    given = {"memory": "1MiB", "disk": "64MiB", "pool": f"{folder}/pool"} | options
    return f"tiered:{folder}?" + "&".join(f"{name}={value}" for name, value in given.items())


def test_tiered_url_keeps_evicted_objects_on_a_disk(tmp_path):
    with open_store(tiered_url(tmp_path)) as store:
        assert type(store) is TieredStore
        assert store.tier.path == f"{tmp_path}/mooncake.tier"
        for key in range(64):
            assert store.put(key, bytes([key]) * (64 << 10)) is PutResult.STORED
        assert store.flush(60)
    os.unlink(f"{tmp_path}/pool")  # as after a restart of the host
    with open_store(tiered_url(tmp_path)) as store:
        found = [store.get(key) for key in range(64)]
    assert sum(value is not None for value in found) > 32
    assert all(value in (None, bytes([key]) * (64 << 10)) for key, value in enumerate(found))


def test_second_process_of_a_tiered_url_has_the_pool(tmp_path):
    other = f"""
from mooncake_serving.connectors.store_url import open_store
with open_store({tiered_url(tmp_path)!r}) as store:
    assert type(store).__name__ == "Store" and store.get(1) == b"one"
"""
    with open_store(tiered_url(tmp_path)) as store:
        store.put(1, b"one")
        subprocess.run([sys.executable, "-c", other], check=True)
        with open_store(tiered_url(tmp_path)) as same_process:
            assert type(same_process) is Store


def test_default_pool_of_a_tiered_url_follows_from_its_path(tmp_path):
    def pool(path):
        return parse_store_url(f"tiered:{path}?disk=1GiB").pool

    assert pool(tmp_path / "a") == pool(tmp_path / "a") != pool(tmp_path / "b")
    assert pool(tmp_path / "a").startswith("/dev/shm/mooncake-")
    (tmp_path / "link").symlink_to(tmp_path)
    assert pool(tmp_path / "link" / "a") == pool(tmp_path / "a")


def test_folder_of_a_tiered_url_may_end_in_a_slash(tmp_path):
    url = f"tiered:{tmp_path}/?disk=1GiB"
    assert parse_store_url(url) == parse_store_url(f"tiered:{tmp_path}?disk=1GiB")
    assert parse_store_url(url).path == f"{tmp_path}/mooncake.tier"
    assert parse_store_url("tiered:/mk-none/?disk=1GiB").path == "/mk-none/mooncake.tier"


def test_small_disk_has_several_buckets():
    assert parse_store_url("tiered:/x?disk=64MiB").bucket_bytes == 8 * MIB
    assert parse_store_url("tiered:/x?disk=1TiB").bucket_bytes == 256 * MIB
    assert parse_store_url("tiered:/x?disk=1TiB&bucket=64MiB").bucket_bytes == 64 * MIB


@pytest.fixture
def server(tmp_path):
    server = RedisServer(tmp_path)
    yield server
    server.stop()


def test_redis_url_joins_a_cluster_and_leaves_it(server):
    url = f"{server.url}?size=8MiB"
    with connect(server.url) as servers, connect(server.url, "other") as others:
        with open_store(url, namespace="m") as here:
            assert isinstance(here, ClusterStore)
            with open_store(url, namespace="m") as there, open_store(server.url) as without_pool:
                assert len(servers.members()) == 3 and without_pool.node.store is None
                assert here.put(1, b"one") is PutResult.STORED
                assert there.get(1) == b"one" and without_pool.get(1) is None
            assert len(servers.members()) == 1
            with open_store(f"{url}&cluster=other"):
                assert len(servers.members()) == len(others.members()) == 1
        assert not servers.members() and here.node.store.closed
        here.close()


def test_what_is_read_from_another_host_again_and_again_is_copied_here(server):
    url = f"{server.url}?size=8MiB"
    with open_store(url) as there, open_store(url) as here:
        there.put(1, b"one")
        for _ in range(8):
            assert here.get(1) == b"one"
        assert here.node.store.get(1) == b"one" == there.node.store.get(1)


def test_pool_of_a_redis_url_may_be_shared(server, tmp_path):
    url = f"{server.url}?size=8MiB&pool={tmp_path}/kv"
    with open_store(url) as here, open_store(url) as there:
        assert here.node.pool_name == there.node.pool_name
        here.put(1, b"one")
        assert there.node.store.get(1) == b"one"


def test_password_comes_from_a_file_or_the_environment(monkeypatch, tmp_path):
    file = tmp_path / "password"
    parsed = parse_store_url(f"redis://host?size=1MiB&password_file={file}")
    with pytest.raises(FileNotFoundError):
        parsed.password()
    file.write_text("a:b@c/d\n")
    assert parsed.password() == "a:b@c/d" and "a:b" not in repr(parsed)
    parsed = parse_store_url("redis://host?password_env=KV_PASSWORD")
    with pytest.raises(InvalidArgument, match="password_env= must be a variable .*, got 'KV_"):
        parsed.password()
    monkeypatch.setenv("KV_PASSWORD", "secret")
    assert parsed.password() == "secret"


@pytest.mark.parametrize(
    "url", ["redis://user:secret@host/3?size=1MiB", "redis://host/3?size=1MiB&password=secret"]
)
def test_text_of_a_url_has_no_login(url):
    parsed = parse_store_url(url)
    assert "secret" in parsed.server  # it is what connects
    assert "secret" not in f"{parsed!r} {parsed}" and "user" not in repr(parsed)
    assert "host/3'" in repr(parsed) and "memory_bytes=1048576" in repr(parsed)


def test_password_reaches_the_server(server, monkeypatch):
    with redis.Redis(port=server.port) as client:
        client.config_set("requirepass", "a:b@c/d?&")
    monkeypatch.setenv("KV_PASSWORD", "wrong")
    url = f"{server.url}?password_env=KV_PASSWORD"
    with pytest.raises(Unavailable) as refused:
        open_store(url)
    assert "wrong" not in str(refused.value)
    monkeypatch.setenv("KV_PASSWORD", "a:b@c/d?&")
    with open_store(url) as store:
        assert not store.exists(1)


@pytest.mark.parametrize(
    "url, message",
    [
        (None, 'url must be "shm:/dev/shm/kv.*, got None'),
        ("", "url must be .*, got ''"),
        ("/dev/shm/kv", "url must be .*, got '/dev/shm/kv'"),
        ("s3://user:secret@bucket/kv", r"url must be .*, got 's3://\*\*\*@bucket/kv'"),
        ("shm:kv?size=1", r"url \(shm:\) must be one with an absolute path, .*, got 'shm:kv\?si"),
        ("shm:/dev/shm/", "must be one with an absolute path"),
        ("shm:/x?sise=1GiB", r"url \(shm:\) must be one with no options but size, got 'sise'"),
        ("shm:/x?size=1GiB&size=2GiB", "url must be one with each option once, got size, size"),
        ("shm:/x?size=lots", "url's size= must be a size such as 4096, .*, got 'lots'"),
        ("shm:/x?size=0", "url's size= must be a size such as .*, got '0'"),
        ("shm:/x?size=-1GiB", "url's size= must be a size"),
        ("shm:/x?size=", "url's size= must be a size such as .*, got ''"),
        ("tiered:/mnt/kv?memory=1GiB", r"url \(tiered:\) must be one with disk=, such as"),
        (
            "tiered:/mnt/kv?disk=1GiB&size=1",
            "no options but memory, disk, pool, bucket, got 'size'",
        ),
        ("tiered:/x?disk=1GiB&pool=kv", "url's pool= must be an absolute path, got 'kv'"),
        ("tiered:/x?disk=1GiB&pool=", "url's pool= must be an absolute path, got ''"),
        ("tiered:/x?disk=10000", "url's disk= must be a size of at least 512KiB, got '10000'"),
        (
            "tiered:/x?disk=1MiB&bucket=4K",
            "url's bucket= must be a size of at least 64KiB, got",
        ),
        ("tiered:mnt/kv/?disk=1GiB", "must be one with an absolute path"),
        (
            "shm:/dev/shm/mk-none?size=100",
            "url's size= or path is wrong: .* from 4096 .*got 100$",
        ),
        (
            "tiered:/mk-none/x?disk=1GiB&memory=1&pool=/dev/shm/mk-none",
            "url's memory= or path is wrong: .*got 1$",
        ),
        ("redis://127.0.0.1:1?size=1", "url's size= or path is wrong: .*got 1$"),
        ("redis://host?sise=1GiB", "url is wrong: .*, or its options size, pool, cluster, engine"),
        ("redis://?size=1GiB", "url is wrong: RedisDirectory: url must be .*, got a URL without a"),
        ("redis://host?size=1X", "url's size= must be a size such as .*, got '1X'"),
        ("redis://host?pool=kv", "url's pool= must be an absolute path, got 'kv'"),
        ("redis://host?cluster=a%20b", "url is wrong: RedisDirectory: cluster must be"),
        ("redis://a:b@host?password_file=/x", "url must be one with a login, password_file="),
        ("redis://host?password_file=/x&password_env=X", "url must be one with a login, pass"),
    ],
)
def test_wrong_url_is_refused_with_what_it_must_be(url, message):
    with pytest.raises(InvalidArgument, match=f"^open_store: .*{message}") as refused:
        open_store(url)
    assert "secret" not in str(refused.value)


def test_pool_without_a_size_must_exist(tmp_path):
    with pytest.raises(
        InvalidArgument, match=f"one with size=, for there is no pool {tmp_path}/kv"
    ):
        open_store(f"shm:{tmp_path}/kv")
    with pytest.raises(InvalidArgument, match="one with memory=, for there is no pool"):
        open_store(tiered_url(tmp_path).replace("memory=1MiB&", ""))
    assert not os.path.exists(f"{tmp_path}/mooncake.tier")


def test_disk_that_was_made_otherwise_is_refused(tmp_path):
    with open_store(tiered_url(tmp_path)):
        pass
    with pytest.raises(InvalidArgument, match="url's disk= and bucket= do not fit: SsdTier: "):
        open_store(tiered_url(tmp_path, bucket="1MiB"))
    with pytest.raises(InvalidArgument, match="url's disk= and bucket= do not fit: SsdTier: "):
        open_store(tiered_url(tmp_path, disk="1MiB"))
