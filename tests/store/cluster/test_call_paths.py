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
    assert functions <= 23 and files <= 9, steps


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
    assert functions <= 10 and files <= 5
    of_two = steps_of(lambda: one.cluster.remove_each(range(2, 4)))
    assert steps_of(lambda: one.cluster.remove_each(range(4, 9))) == of_two
    assert not one.store.exists_each(range(9)).any()


def test_removal_from_another_pool(pair):
    one, two = pair
    one.cluster.put_each(range(2), [value(i) for i in range(2)])
    assert two.cluster.remove(0)
    functions, files = counts_of(steps_of(lambda: two.cluster.remove(1)))
    assert functions <= 20 and files <= 8
    assert not one.store.exists_each(range(2)).any()


def test_no_call_passes_more_than_ten_files(pair):
    """With the round trip to the directory."""
    one, two = pair
    into = bytearray(len(value(1)))
    calls = {
        "put": lambda key: one.cluster.put_from(key, value(1)),
        "get": lambda key: two.cluster.get_into(key, into),
        "remove, another's": lambda key: two.cluster.remove(key),
        "put again": lambda key: one.cluster.put_from(key, value(1)),
        "remove, own": lambda key: one.cluster.remove(key),
    }
    for name, call in calls.items():
        call("first")
        functions, files = counts_of(walk(lambda call=call: call("second")))
        assert functions <= 40 and files <= 10, name
