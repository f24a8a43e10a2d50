"""What a pool's engine publishes with: only objects that no one else has, or is writing."""

import pytest
import redis

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.transfer import RedisPublisher
from mooncake_serving.store.directory import Claim, EmbeddedDirectory, Member, RedisDirectory

from ...metadata.conftest import tls_url  # noqa: F401
from ...metadata.support import eventually
from .support import LONG_S, RedisWorld, all_of, holders_of, keys, kill

A = Member("a", "host 1", "pool 1")
B = Member("b", "host 2", "pool 2")
WRITER = Member("w", "host 3")


@pytest.fixture(name="world")
def redis_world(server, request):
    world = RedisWorld(f"unix://{server.folder}/redis.sock", f"publisher-{id(request)}")
    for member in (A, B, WRITER):
        world.directory.join(member, LONG_S)
    yield world
    world.close()


def test_new_objects_are_listed(world):
    directory = world.directory
    publisher = directory.publisher(A.pool)
    assert isinstance(publisher, RedisPublisher)
    assert publisher.publish(keys(1, 2)).all()
    assert holders_of(directory, 1, 2, 3) == [[A.pool], [A.pool], []]
    assert all_of(directory, A.pool) == {1, 2}
    assert publisher.publish(keys(1, 3)).all(), "this pool's own entry is no obstacle"
    assert holders_of(directory, 1, 3) == [[A.pool], [A.pool]]


def test_objects_of_another_pool_are_not_listed(world):
    directory = world.directory
    directory.publish(B.pool, keys(1, 2))
    publisher = directory.publisher(A.pool)
    assert publisher.publish(keys(1, 5, 2)).tolist() == [False, True, False]
    assert holders_of(directory, 1, 5) == [[B.pool], [A.pool]]
    assert all_of(directory, A.pool) == {5}
    kill(world, B)
    assert publisher.publish(keys(1)).all()
    assert holders_of(directory, 1) == [[A.pool]]


def test_objects_claimed_by_another_member_are_not_listed(world):
    directory = world.directory
    assert directory.claim(WRITER.name, keys(1), LONG_S).tolist() == [Claim.GRANTED]
    publisher = directory.publisher(A.pool)
    assert publisher.publish(keys(1, 2)).tolist() == [False, True]
    kill(world, WRITER)
    assert publisher.publish(keys(1)).all()
    assert directory.claim(A.name, keys(3), LONG_S).tolist() == [Claim.GRANTED]
    assert not publisher.publish(keys(3)).any(), "a draining member gives it to another pool"
    assert directory.claim(B.name, keys(1), LONG_S).tolist() == [Claim.EXISTS]


def test_a_removal_ends_with_the_next_put(world):
    directory = world.directory
    publisher = directory.publisher(A.pool)
    publisher.publish(keys(1))
    assert directory.remove(keys(1), LONG_S) == [(A.pool,)]
    assert publisher.publish(keys(1)).all()
    assert holders_of(directory, 1) == [[A.pool]]
    directory.publish(B.pool, keys(1), is_copy=True)
    assert holders_of(directory, 1) == [[A.pool, B.pool]], "the copy is of the new object"
    directory.remove(keys(2), LONG_S)
    assert publisher.publish(keys(1, 2)).tolist() == [False, True], "also among known ones"
    directory.publish(B.pool, keys(2), is_copy=True)
    assert holders_of(directory, 2) == [[A.pool, B.pool]]


def test_pool_without_members_lists_nothing(world):
    publisher = world.directory.publisher(A.pool)
    world.directory.leave(A.name)
    assert not publisher.publish(keys(1, 2)).any()
    assert publisher.reason == "" and holders_of(world.directory, 1) == [[]]
    world.directory.join(A, LONG_S)
    assert publisher.publish(keys(1)).all()


def test_publisher_fails_after_a_server_restart(start):
    server = start()
    with RedisDirectory(f"redis://127.0.0.1:{server.port}/0") as directory:
        directory.join(A, LONG_S)
        publisher = directory.publisher(A.pool)
        assert publisher.publish(keys(1)).all()
        server.stop()
        assert publisher.publish(keys(2)) is None and publisher.reason and not publisher.is_late
        with pytest.raises(Unavailable):
            directory.publisher(A.pool)
        server.start()
        assert publisher.publish(keys(2)) is None
        another = directory.publisher(A.pool)
        assert not another.publish(keys(2)).any(), "the server knows no member"
        directory.join(A, LONG_S)
        assert another.publish(keys(2)).all()


def test_publisher_has_its_own_connection(start):
    server = start()
    directory = RedisDirectory(f"redis://127.0.0.1:{server.port}/0")
    with redis.Redis(port=server.port) as client:

        def num_clients() -> int:
            return len(client.client_list())

        directory.join(A, LONG_S)
        before = num_clients()
        publisher = directory.publisher(A.pool)
        assert num_clients() == before + 1
        assert directory.members() == [A]
        directory.close()
        eventually(lambda: num_clients() == 2, "a connection is left")
        assert publisher.publish(keys(1)).all()
        del publisher
        eventually(lambda: num_clients() == 1, "its connection is left")


def test_timed_out_publish_has_no_effect(start, impatient):
    """Whoever has sent it has given up."""
    server = start()
    with RedisDirectory(f"redis://127.0.0.1:{server.port}/0") as directory:
        directory.join(A, LONG_S)
        publisher = directory.publisher(A.pool)
        server.freeze()
        try:
            assert publisher.publish(keys(1)) is None and publisher.is_late
        finally:
            server.thaw()
        eventually(lambda: directory.members() == [A], "it does not answer any more")
        assert holders_of(directory, 1) == [[]]


def test_no_publisher_over_tls(request):
    with RedisDirectory(request.getfixturevalue("tls_url")) as directory:
        directory.join(A, LONG_S)
        assert directory.publisher(A.pool) is None
        assert directory.members() == [A]


def test_embedded_directory_has_no_publisher():
    assert EmbeddedDirectory().publisher("pool") is None


@pytest.mark.parametrize("pool", ["", 5, "x" * 256])
@pytest.mark.parametrize("make", [EmbeddedDirectory, lambda: RedisDirectory("redis://none")])
def test_wrong_names(make, pool):
    with make() as directory, pytest.raises(InvalidArgument, match="publisher: pool must be a str"):
        directory.publisher(pool)
