"""Specific to Redis: URLs, passwords, clusters, forgotten scripts, what remains in it."""

from urllib.parse import quote

import numpy as np
import pytest
import redis

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_serving.store.directory import Claim, Member, RedisDirectory, connect

from ...metadata.support import raw_server
from ...walk import walk
from .support import LONG_S, keys

A = Member("a", "host 1", "pool 1")
B = Member("b", "host 2", "pool 2")
SECRET = "s3cr3t"


@pytest.fixture
def url(server):
    return server.url


@pytest.fixture
def client(server):
    with redis.Redis(port=server.port) as client:
        client.flushall()
        yield client


@pytest.mark.parametrize(
    "url, why",
    [
        (None, "got a NoneType"),
        ("redis", "got no URL"),
        ("http://host/metadata", "got a URL of another scheme"),
        ("redis://", "got a URL without a host"),
        ("redis://host:0", "port 0"),
        ("redis://host/x", "got a database that is no number"),
        ("unix://host/x", "without an absolute path"),
        (f"redis://:{SECRET}#@host", "got no URL"),
        (f"redis://host?password={SECRET}&x=1", "options other than"),
        ("redis://host?prefix=x/", "got a prefix"),
        ("redis+sentinel://a:1,b:2", "sentinels without the name of a service"),
        ("redis+sentinel://a:1,:2/name", "got no URL"),
        ("redis+sentinel://a:1,b:0/name", "got no URL"),
    ],
)
def test_wrong_urls(url, why):
    with pytest.raises(
        InvalidArgument, match=f'RedisDirectory: url must be "redis://.*{why}'
    ) as caught:
        connect(url)
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize("cluster", ["", "a b", "{a}", 65 * "x", "é", None])
def test_wrong_clusters(cluster):
    with pytest.raises(InvalidArgument, match="RedisDirectory: cluster must be 1 to 64 letters"):
        connect("redis://127.0.0.1:1", cluster)


def test_clusters_are_isolated(url):
    with connect(url, "one") as one, connect(url, "two") as two, connect(url, "one") as again:
        one.join(A, LONG_S)
        two.join(B, LONG_S)
        one.publish("pool 1", keys(1))
        assert again.members() == [A] and two.members() == [B]
        assert len(again.match_prefix(keys(1))) == 1 and len(two.match_prefix(keys(1))) == 0
        assert one.claim("a", keys(2), LONG_S) == two.claim("b", keys(2), LONG_S) == Claim.GRANTED
        one.leave("a")
        assert one.sweep() == ["pool 1"] and two.sweep() == [] and two.members() == [B]


def test_a_password_is_used_and_not_shown(start):
    server = start("--requirepass", SECRET)
    for url in (
        f"redis://:{SECRET}@127.0.0.1:{server.port}",
        f"unix://{quote(str(server.folder))}/redis.sock?password={SECRET}",
    ):
        with connect(url) as directory:
            directory.join(A, LONG_S)
            assert directory.members() == [A]
    with connect(f"redis://:wrong{SECRET}@127.0.0.1:{server.port}/0") as directory:
        with pytest.raises(Unavailable, match=f"redis://127.0.0.1:{server.port}/0: ") as caught:
            directory.members()
        assert SECRET not in str(caught.value)


def test_flushed_scripts_are_reloaded(url, client):
    with connect(url) as directory:
        for _ in range(2):
            directory.join(A, LONG_S)
            client.script_flush()
            many = keys(*range(10_000))
            directory.publish("pool 1", many)  # three scripts in one round trip
            client.script_flush()
            assert len(directory.match_prefix(many)) == 10_000
            client.script_flush()
            assert directory.renew(A, LONG_S)
            assert directory.sweep() == []


def test_one_call_is_one_round_trip(url, client):
    """The server counts how often it reads: what comes together is read at once."""

    def reads() -> int:
        return client.info("stats")["total_reads_processed"]

    some = keys(*range(256))
    with connect(url) as directory:
        directory.join(A, LONG_S)
        for call in (
            lambda: directory.renew(A, LONG_S),
            lambda: directory.members(),
            lambda: directory.claim("a", some, LONG_S),
            lambda: directory.publish("pool 1", some),
            lambda: directory.holders(some),
            lambda: directory.match_prefix(some),
            lambda: directory.withdraw("pool 1", some),
            lambda: directory.give_up("pool 1", some, LONG_S),
        ):
            call()  # its script is known from now on
            before = reads()
            call()
            assert reads() - before == 1 + 1  # this question itself


@pytest.mark.parametrize("call, most", [("holders", 11), ("remove", 13)])
def test_one_call_enters_few_functions(url, client, call, most):
    arguments = (keys(1), LONG_S) if call == "remove" else (keys(1),)
    found = []
    with connect(url) as directory:
        directory.join(A, LONG_S)
        directory.publish("pool 1", keys(1))
        getattr(directory, call)(*arguments)  # it is connected, and the script is known from now on
        entered = walk(lambda: found.extend(getattr(directory, call)(*arguments)))
    assert found == [("pool 1",)]
    assert len(entered) <= most, entered
    assert len({file for file, _ in entered}) <= 4, entered


def test_sweep_leaves_nothing_of_dead_members(url, client):
    with connect(url) as directory:
        directory.join(A, LONG_S)
        directory.join(B, LONG_S)
        many = keys(*range(10_000))
        directory.claim("a", many, LONG_S)
        directory.publish("pool 1", many)
        directory.publish("pool 2", many[:10])
        directory.leave("a")
        assert directory.sweep() == ["pool 1"]
        names = ["p<pool 2>", "alive", "served", "members", "pools", "names", "numbers"]
        assert client.dbsize() == 10 + len(names)
        directory.leave("b")
        assert directory.sweep() == ["pool 2"]
        assert client.keys() == [b"{mooncake}:numbers"]


def test_claims_expire_in_redis_and_pools_are_stored_as_numbers(url, client):
    with connect(url, "c") as directory:
        directory.join(A, LONG_S)
        directory.join(B, LONG_S)
        directory.claim("a", keys(1, 2), LONG_S)
        claims = client.keys("{c}:c*")
        assert len(claims) == 2
        assert all(0 < client.pttl(claim) <= LONG_S * 1000 for claim in claims)
        directory.publish("pool 1", keys(1, 2))
        directory.publish("pool 2", keys(1, 2))
        assert client.keys("{c}:c*") == []
        names = client.keys("{c}:o*")
        assert sorted(names) == sorted(b"{c}:o" + key.tobytes() for key in keys(1, 2))
        assert client.mget(names) == [b"1 3 ", b"1 3 "]
        directory.withdraw("pool 1", keys(1))
        directory.withdraw("pool 2", keys(2))
        assert client.mget(sorted(names)) == [b"3 ", b"1 "]


def test_replica_rejects_calls(start):
    server = start()
    with connect(server.url) as directory, redis.Redis(port=server.port) as client:
        directory.join(A, LONG_S)
        client.replicaof("127.0.0.1", "1")
        with pytest.raises(Unavailable, match=f"metadata server {server.url}: .*replica"):
            directory.publish("pool 1", keys(1))
        with pytest.raises(Unavailable):
            directory.renew(A, LONG_S)
        client.replicaof("no", "one")
        assert not directory.renew(A, LONG_S)  # it was a replica, who knows of whom


def test_full_server_rejects_writes_but_allows_removal(start):
    server = start()
    many = keys(*range(10))
    with connect(server.url) as directory, redis.Redis(port=server.port) as client:
        for i, member in enumerate((A, B, Member("c", "host 3", "pool 3"))):
            directory.join(member, LONG_S)
            directory.publish(member.pool, many[i:])
        client.config_set("maxmemory", 1)
        full = f"metadata server {server.url}: .*maxmemory"
        with pytest.raises(Unavailable, match=full):
            directory.publish("pool 1", keys(10))
        with pytest.raises(Unavailable, match=full):
            directory.claim("a", keys(10), LONG_S)
        with pytest.raises(Unavailable, match=full):
            directory.renew(A, LONG_S)
        directory.withdraw("pool 1", many[6:])
        assert directory.give_up("pool 1", many[5:6], LONG_S).all()
        directory.leave("b")
        assert directory.sweep() == ["pool 2"]
        assert directory.holders(many[4:6]) == [("pool 1", "pool 3"), ("pool 3",)]
        directory.leave("c")
        assert directory.remove(many, LONG_S) == [("pool 1",)] * 6 + [()] * 4
        assert directory.sweep() == ["pool 3"]
        assert client.keys("{mooncake}:o*") == []


def test_foreign_redis_type_under_our_key_is_reported(url, client):
    with connect(url) as directory:
        client.set("{mooncake}:members", "x")
        with pytest.raises(Unavailable, match="metadata server redis://.*WRONGTYPE"):
            directory.members()


CALLS = {
    "join": lambda d: d.join(A, 1),
    "renew": lambda d: d.renew(A, 1),
    "leave": lambda d: d.leave("a"),
    "members": lambda d: d.members(),
    "claim": lambda d: d.claim("a", keys(1, 2), 1),
    "publish": lambda d: d.publish("p", keys(1)),
    "publisher": lambda d: d.publisher("p"),
    "withdraw": lambda d: d.withdraw("p", keys(1)),
    "give_up": lambda d: d.give_up("p", keys(1), 1),
    "abandon": lambda d: d.abandon("a", keys(1)),
    "holders": lambda d: d.holders(keys(1, 2)),
    "match_prefix": lambda d: d.match_prefix(keys(1, 2)),
    "keys_of": lambda d: d.keys_of("p"),
    "num_objects": lambda d: d.num_objects("p"),
    "sweep": lambda d: d.sweep(),
}
NONSENSE = {
    "nothing": b"",
    "no protocol": b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "a status": b"+OK\r\n",
    "null": b"$-1\r\n",
    "a negative number": b":-5\r\n",
    "a large number": b":99999999999999999999\r\n",
    "a string": b"$3\r\nabc\r\n",
    "a list of numbers": b"*3\r\n:1\r\n:2\r\n:3\r\n",
    "strings that say nothing": b"*2\r\n$1\r\na\r\n$2\r\nbc\r\n",
    "an index out of range": b'*2\r\n$7\r\n[["p"]]\r\n$4\r\n\2\0\0\0\r\n',
    "more indices than keys": b'*2\r\n$7\r\n[["p"]]\r\n$12\r\n' + 3 * b"\1\0\0\0" + b"\r\n",
    "a half index": b"*2\r\n$2\r\n[]\r\n$2\r\nab\r\n",
    "names that are none": b"*2\r\n$5\r\n[[1]]\r\n$4\r\n\1\0\0\0\r\n",
    "lists of names that are none": b'*2\r\n$3\r\n"p"\r\n$4\r\n\1\0\0\0\r\n',
    "a member without a host": b'*1\r\n$12\r\n{"name":"a"}\r\n',
    "lists in lists": 5000 * b"*1\r\n",
    "more than there may be": b"$40000000\r\n" + b"x" * 40_000_000,
    "half an answer": b"*2\r\n$5\r\nab",
}


@pytest.mark.parametrize("nonsense", NONSENSE)
def test_malformed_server_replies_are_reported(nonsense, impatient):
    def behave(connection):
        while connection.recv(1 << 16):
            connection.sendall(NONSENSE[nonsense])

    with raw_server(behave) as port:
        slow = nonsense in ("nothing", "half an answer", "more than there may be")
        for name in ("claim", "members") if slow else CALLS:
            with connect(f"redis://127.0.0.1:{port}/0") as directory:
                with pytest.raises(Unavailable):
                    CALLS[name](directory)


def test_no_server_is_there():
    with raw_server(lambda connection: None) as port:
        pass
    with RedisDirectory(f"redis://127.0.0.1:{port}/0") as directory:
        for call in CALLS.values():
            with pytest.raises(Unavailable, match=f"metadata server redis://127.0.0.1:{port}/0: "):
                call(directory)


def test_keys_are_stored_little_endian(url, client):
    with connect(url) as directory:
        directory.join(A, LONG_S)
        directory.publish("pool 1", np.array([[1, 2]], np.uint64))
        assert client.exists(b"{mooncake}:o" + b"\1" + 7 * b"\0" + b"\2" + 7 * b"\0")
        assert directory.keys_of("pool 1")[1].tolist() == [[1, 2]]
        directory.publish("pool 1", keys(3).astype(">u8"))
        assert len(directory.match_prefix(keys(3))) == 1
