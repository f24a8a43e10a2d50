"""How many functions of this project one put and one removal enter, and in how many files: the
directory is in Redis, and what a round trip to it takes is not counted.
"""

import pytest

from mooncake_serving.store.directory import connect

from ...metadata.support import RedisServer
from ...walk import OF_DIRECTORIES, walk
from ..support import STORED
from .support import Hosts, value


@pytest.fixture
def pair(tmp_path):
    server = RedisServer(tmp_path)
    with connect(server.url) as servers:
        hosts = Hosts(servers)
        yield hosts.several(2)
        hosts.close()
    server.stop()


def steps_of(call) -> list[tuple[str, str]]:
    return walk(call, without=OF_DIRECTORIES)


def counts_of(steps) -> tuple[int, int]:
    """Functions, and files."""
    return len(steps), len({file for file, _ in steps})


def test_put_into_the_own_pool(pair):
    one, _ = pair
    results = [one.cluster.put("first", value(1))]
    steps = steps_of(lambda: results.append(one.cluster.put("a", value(1))))
    assert results == [STORED] * 2
    functions, files = counts_of(steps)
    assert functions <= 24 and files <= 9, steps


def test_put_of_a_batch_takes_as_many_steps_however_large_it_is(pair):
    one, _ = pair

    def names(keys) -> list[str]:
        values = [value(1)] * len(keys)
        steps = steps_of(lambda: one.cluster.put_each(keys, values))
        assert one.store.exists_each(keys).all()
        return [name for _, name in steps if name != "as_buffer"]

    names(range(2))
    assert names(range(10, 18)) == names(range(20, 22))


def test_removal_from_the_own_pool(pair):
    one, _ = pair
    one.cluster.put_each(range(9), [value(i) for i in range(9)])
    assert one.cluster.remove(0)
    functions, files = counts_of(steps_of(lambda: one.cluster.remove(1)))
    assert functions <= 11 and files <= 6
    of_two = steps_of(lambda: one.cluster.remove_each(range(2, 4)))
    assert steps_of(lambda: one.cluster.remove_each(range(4, 9))) == of_two
    assert not one.store.exists_each(range(9)).any()


def test_removal_from_another_pool(pair):
    one, two = pair
    one.cluster.put_each(range(2), [value(i) for i in range(2)])
    assert two.cluster.remove(0)
    functions, files = counts_of(steps_of(lambda: two.cluster.remove(1)))
    assert functions <= 25 and files <= 13
    assert not one.store.exists_each(range(2)).any()
