"""Objects read and written by many threads at once."""

import threading
from functools import partial

import numpy as np
import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.pool import ObjectPool

from ..threads import in_threads
from .objects import (
    DONE,
    content,
    here_fixture,  # noqa: F401
    key,
    serving,
)
from .support import WAIT_S, addressed, eventually, untouched


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_many_threads(transport):
    with serving(32 << 20, transport) as here:
        objects = {i: here.put(i, 1 + i * 7919 % 300_000).tobytes() for i in range(64)}

        def work(i):
            rng = np.random.default_rng(i)
            for turn in range(20):
                mine = 1000 * (i + 1) + turn
                data = content(mine, int(rng.integers(0, 50_000)))
                assert here.write({mine: data}) == [DONE]
                numbers = rng.choice(64, 8).tolist()
                got = here.read(*numbers, mine)
                assert got == [*(objects[number] for number in numbers), data.tobytes()]
                if turn % 3 == 0:
                    here.ask(*numbers).close()
                assert here.remove(mine) == [DONE]

        in_threads(*(partial(work, i) for i in range(8)))
        eventually(here.is_at_rest)
        stats = here.near.stats()["peers"][here.far.name]
        assert stats["num_in_flight"] == stats["num_errors"] == 0
        counts = here.pool.counts()
        assert (counts.num_stored, counts.num_removed) == (64 + 8 * 20, 8 * 20)
        assert counts.num_misses == 0


@pytest.mark.parametrize("most", [1, 2])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_few_connections_for_objects_and_transfers(transport, most):
    with serving(transport=transport, near={"max_connections": most}) as here:
        data = here.put(1, 500_000).tobytes()
        source = here.near.register(addressed(1 << 20))
        targets = [here.far.register(untouched(1 << 20)) for _ in range(2)]

        def work(i):
            for turn in range(15):
                if i < 2:
                    row = (source.address, targets[i].address, 1 << 20)
                    here.near.write(here.peer, [row], notify=b"x", deadline_s=WAIT_S).wait()
                elif turn % 5 == 0:
                    here.ask(1).close()
                else:
                    assert here.read(1) == [data]

        in_threads(*(partial(work, i) for i in range(5)))
        for target in targets:
            np.testing.assert_array_equal(target._buffer.owner, addressed(1 << 20))


def test_read_times_out_when_no_connection_is_free():
    with serving(near={"max_connections": 1}) as here:
        data = here.put(1, 100).tobytes()
        with here.ask(1):
            with pytest.raises(TransferError, match=r"all 1 connections \(max_connections\)"):
                here.ask(1, deadline_s=0.2)
        assert here.read(1) == [data]


def test_served_pool_can_be_swapped_under_load(here):
    pools = [ObjectPool.create(1 << 20) for _ in range(3)]
    for number, pool in enumerate(pools):
        pool.put_from(key(1), content(number, 100_000))
    expected = [[content(number, 100_000).tobytes()] for number in range(3)]
    stop = threading.Event()

    def swap():
        turn = 0
        while not stop.is_set():
            here.far.serve(pools[turn % 3])
            turn += 1

    here.far.serve(pools[0])
    thread = threading.Thread(target=swap, daemon=True)
    thread.start()
    try:
        for _ in range(300):
            assert here.read(1) in expected
    finally:
        stop.set()
        thread.join(WAIT_S)
    assert all(eventually(lambda pool=pool: pool.stats().num_pins == 0) for pool in pools)
