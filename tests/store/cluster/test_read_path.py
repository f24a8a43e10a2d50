"""The way of a read of another host's object: a reader of the code follows each function."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool
from mooncake_serving.store import Store

from ...walk import OF_DIRECTORIES, walk
from .support import UNIT, value

OF_READS = ("/store/cluster/", "/rpc/", "/transfer/")


def entered(call: Callable) -> list[tuple[str, str]]:
    return walk(call, without=OF_DIRECTORIES)


def test_a_read_from_another_host_takes_few_steps(hosts):
    one, two = hosts.several(2)
    one.cluster.put_each(["first", "second"], [value(1), value(2)])
    into = bytearray(UNIT)
    assert two.cluster.get_into("first", into) == UNIT  # what is made once
    steps = entered(lambda: two.cluster.get_into("second", into))
    assert into == value(2)
    own_pool = entered(lambda: two.store.get_into("none", into))
    remote = [step for step in steps if step not in own_pool]
    assert len(remote) <= 22, remote
    files = {file for file, _ in remote}
    assert len(files) <= 7, files
    reading = {file for file in files if any(part in file for part in OF_READS)}
    assert len(reading) <= 5, reading  # the rest looks at arguments


def test_objects_of_one_holder_are_read_in_one_request(hosts):
    one, two = hosts.several(2)
    keys = range(64)
    one.cluster.put_each(keys, [value(key) for key in keys])
    arrays = [bytearray(UNIT) for _ in keys]
    steps = entered(lambda: two.cluster.get_into_each(keys, arrays))
    assert arrays == [value(key) for key in keys]
    names = [name for _, name in steps]
    for once in ("Locations.find", "Reads._read_inline", "read_into_checked"):
        assert names.count(once) == 1, once


def test_many_objects_of_one_holder_do_not_take_all_its_pins(hosts):
    pool = ObjectPool.create(4096 * UNIT, num_objects=4096, num_pins=1024)
    one, two = hosts.make("one", store=Store(pool, evict_ratio=0.0)), hosts.make("two", 0)
    keys, content = range(3000), value(1)
    one.cluster.put_each(keys, [content] * len(keys))
    arrays = [bytearray(UNIT) for _ in keys]
    for _ in range(2):  # where they are is found out, then remembered
        assert (two.cluster.get_into_each(keys, arrays) == UNIT).all()
    assert all(array == content for array in arrays)


def test_read_waits_for_pins_of_other_readers(hosts):
    pool = ObjectPool.create(64 * UNIT, num_pins=4)
    one, two = hosts.make("one", store=Store(pool, evict_ratio=0.0)), hosts.make("two", 0)
    for key in range(5):
        one.cluster.put(key, value(key))
    held = [one.store.view(key) for key in range(4)]
    with ThreadPoolExecutor(1) as thread:
        read = thread.submit(two.cluster.get, 4)
        time.sleep(0.05)  # it is refused meanwhile
        for pinned in held:
            pinned.close()
        assert read.result(10) == value(4)


@pytest.mark.parametrize("size", [UNIT, 4 << 20])
@pytest.mark.parametrize("offset", [np.int8(5), np.int32(5), np.uint64(5)])
def test_offset_may_be_an_integer_of_numpy(hosts, size, offset):
    one, two = hosts.make("one", 8 << 20), hosts.make("two", 0)
    content = np.random.default_rng(1).integers(0, 256, size, np.uint8).tobytes()
    one.cluster.put("a", content)
    into = bytearray(300)
    assert two.cluster.get_into("a", into, offset=offset) == size
    assert into == content[5:305]
    with pytest.raises(InvalidArgument, match="offset must be within the object"):
        two.cluster.get_into("a", into, offset=np.uint64(2**64 - 2))
