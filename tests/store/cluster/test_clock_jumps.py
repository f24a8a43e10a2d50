"""The clock of the directory's server jumps by an hour or a day: what is read is right, and what is
put is found again."""

import pytest

from mooncake_kernels.errors import Unavailable
from mooncake_serving.store.directory import connect

from ...clock.shifted import JUMPS_S, ShiftedClock
from ...metadata.support import RedisServer
from ..directory.conftest import patient  # noqa: F401
from ..support import STORED, eventually
from .processes import HostProcess, put
from .support import SHORT_TTL_S, Hosts, value

NUM_OBJECTS = 8


@pytest.fixture
def clock(tmp_path):
    return ShiftedClock(tmp_path)


@pytest.fixture
def redis(tmp_path, clock):
    server = RedisServer(tmp_path, environ=clock.environ)
    yield server
    server.stop()


def reads(host) -> set[str]:
    """What its reads of all objects give; wrong bytes fail."""
    found = [host.cluster.get(key) for key in range(NUM_OBJECTS)]
    assert all(one in (None, value(key)) for key, one in enumerate(found))
    return {"miss" if one is None else "hit" for one in found}


def is_put(host, key: int) -> bool:
    try:
        return host.cluster.put(key, value(key)) is STORED
    except Unavailable:  # by a command that the server has refused as too late
        return False


@pytest.mark.parametrize("seconds", JUMPS_S)
def test_cluster_survives_directory_clock_jumps(redis, clock, seconds):
    with connect(redis.url) as servers:
        hosts = Hosts(servers)
        here = hosts.make("here", ttl_s=SHORT_TTL_S, answer_s=1.0)
        there = HostProcess(redis.url, "there", ttl_s=SHORT_TTL_S)
        assert {there.do(put, key, value(key)) for key in range(NUM_OBJECTS)} == {STORED}
        assert reads(here) == {"hit"}
        clock.set(seconds)
        assert reads(here) <= {"hit", "miss"}
        numbers = iter(range(100, 10_000))
        eventually(lambda: is_put(here, next(numbers)))
        eventually(lambda: len(servers.members()) == 2)
        eventually(lambda: reads(here) == {"hit"}, "both have joined again, and published")

        clock.set(0)  # and back
        eventually(lambda: len(servers.members()) == 2 and is_put(here, next(numbers)))
        eventually(lambda: reads(here) == {"hit"})
        there.kill()
        hosts.close()


def test_clock_set_back_extends_listing_of_dead_member(redis, clock):
    """As docs/store/directory.md says. No one waits for it, and its objects are misses."""
    with connect(redis.url) as servers:
        hosts = Hosts(servers)
        here = hosts.make("here", ttl_s=SHORT_TTL_S, answer_s=1.0)
        there = HostProcess(redis.url, "there", ttl_s=SHORT_TTL_S)
        assert {there.do(put, key, value(key)) for key in range(NUM_OBJECTS)} == {STORED}
        there.stop()
        clock.set(-3600)
        there.kill()
        assert reads(here) == {"miss"}
        numbers = iter(range(100, 10_000))
        eventually(lambda: is_put(here, next(numbers)))
        assert len(servers.members()) == 2
        clock.set(0)
        eventually(lambda: len(servers.members()) == 1)
        assert all(here.cluster.put(key, value(key)) is STORED for key in range(NUM_OBJECTS))
        assert reads(here) == {"hit"}
        hosts.close()
