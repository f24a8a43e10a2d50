"""Servers that die, lose all of their data or the last writes, or are replaced by others."""

import os

import numpy as np
import pytest
import redis

from mooncake_kernels.errors import Unavailable
from mooncake_serving.store.directory import Claim, Member, connect

from ...metadata.support import eventually
from .support import LONG_S, holders_of, keys

A = Member("a", "host 1", "pool 1")
B = Member("b", "host 2", "pool 2")


def settle(directory, member: Member, has: np.ndarray) -> None:
    """What a node does whose ``renew`` says that it is not known."""
    directory.join(member, LONG_S)
    directory.publish(member.pool, has)


def unavailable(directory) -> bool:
    with pytest.raises(Unavailable):
        directory.members()
    return True


def test_server_restarted_empty(start):
    server = start()
    with connect(server.url) as directory:
        settle(directory, A, keys(1, 2))
        settle(directory, B, keys(2))
        assert directory.claim("a", keys(3), LONG_S) == Claim.GRANTED
        server.stop()
        for call in (
            directory.members,
            lambda: directory.renew(A, LONG_S),
            lambda: directory.claim("a", keys(1), LONG_S),
            lambda: directory.publish("pool 1", keys(1)),
            directory.sweep,
        ):
            with pytest.raises(Unavailable):
                call()
        server.start()
        assert directory.members() == [] and len(directory.match_prefix(keys(1))) == 0
        assert not directory.renew(A, LONG_S) and not directory.renew(B, LONG_S)
        with pytest.raises(Unavailable, match="no living member"):
            directory.claim("b", keys(3), LONG_S)
        settle(directory, A, keys(1, 2))
        settle(directory, B, keys(2))
        assert directory.renew(A, LONG_S) and directory.renew(B, LONG_S)
        assert holders_of(directory, 1, 2) == [["pool 1"], ["pool 1", "pool 2"]]
        assert directory.claim("b", keys(3), LONG_S) == Claim.GRANTED


def test_server_flushed(start):
    server = start()
    with connect(server.url) as directory, redis.Redis(port=server.port) as client:
        settle(directory, A, keys(1))
        client.flushall()
        assert not directory.renew(A, LONG_S)
        settle(directory, A, keys(1))
        assert directory.renew(A, LONG_S) and len(directory.match_prefix(keys(1))) == 1


def test_server_restarted_from_an_old_snapshot(start):
    """Written to disk before the last objects: who is known cannot tell by that alone."""
    server = start("--dbfilename", "dump.rdb")
    with connect(server.url) as directory, redis.Redis(port=server.port) as client:
        settle(directory, A, keys(1))
        client.save()
        directory.publish("pool 1", keys(2))
        server.stop()
        server.start()
        eventually(lambda: directory.members() == [A], "the server did not load")
        assert holders_of(directory, 1, 2) == [["pool 1"], []]
        assert not directory.renew(A, LONG_S)
        settle(directory, A, keys(1, 2))
        assert directory.renew(A, LONG_S)
        assert holders_of(directory, 1, 2) == [["pool 1"], ["pool 1"]]


def test_failover_to_a_lagging_replica(start, tmp_path):
    """Both servers behind one Unix socket, as behind a virtual address."""
    first, second = start(), start()
    address = tmp_path / "address"
    address.symlink_to(first.folder / "redis.sock")
    with (
        connect(f"unix://{address}") as directory,
        redis.Redis(port=second.port) as replica,
    ):
        settle(directory, A, keys(1))
        settle(directory, B, keys(1))
        assert directory.claim("a", keys(5), LONG_S) == Claim.GRANTED
        replica.replicaof("127.0.0.1", str(first.port))
        eventually(lambda: replica.info()["master_link_status"] == "up", "no replica")
        eventually(lambda: replica.exists("{mooncake}:members"), "nothing was replicated")
        replica.replicaof("no", "one")  # and so it misses what follows
        directory.publish("pool 1", keys(2))
        directory.withdraw("pool 2", keys(1))
        late = Member("late", "host 3", "pool 3")
        settle(directory, late, keys(3))

        first.stop()
        assert unavailable(directory)
        os.replace(second.folder / "redis.sock", address)

        assert directory.members() == [A, B]
        assert holders_of(directory, 1, 2, 3) == [["pool 1", "pool 2"], [], []]
        assert directory.claim("b", keys(5), LONG_S) == Claim.TAKEN  # its member was not away
        for member in (A, B, late):
            assert not directory.renew(member, LONG_S)
        settle(directory, A, keys(1, 2))
        assert directory.renew(A, LONG_S)
        assert not directory.renew(B, LONG_S)  # each for itself
        settle(directory, late, keys(3))
        settle(directory, B, keys())
        assert all(directory.renew(member, LONG_S) for member in (A, B, late))
        assert holders_of(directory, 2, 3) == [["pool 1"], ["pool 3"]]
        assert directory.claim("b", keys(5), LONG_S) == Claim.TAKEN
        assert directory.sweep() == []
