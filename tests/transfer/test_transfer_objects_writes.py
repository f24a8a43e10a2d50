"""Objects written to a peer's pool, and removed from it."""

import contextlib
import itertools
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import checksum_of

from ..threads import in_threads
from .objects import (
    ABSENT,
    BEING_WRITTEN,
    DONE,
    EXISTS,
    FULL,
    LARGE,
    MOST,
    TOO_LARGE,
    content,
    here_fixture,  # noqa: F401
    key,
    keys,
    place,
    serving,
)
from .support import eventually, untouched


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
def test_written_objects_are_stored(transport, verify, checksum):
    sizes = [1, 0, 4096, 5, (1 << 20) + 1, 0]
    with serving(transport=transport, checksum=checksum) as here:
        objects = {i: content(i, size) for i, size in enumerate(sizes)}
        assert here.write(objects, verify=verify) == [DONE] * len(sizes)
        for number, data in objects.items():
            assert here.stored(number) == data.tobytes()
            with here.pool.pin(key(number)) as pin:
                assert pin.checksum == (checksum_of(data) if checksum else None)
        assert here.read(*objects) == [data.tobytes() for data in objects.values()]
        assert here.write(objects, verify=verify) == [EXISTS] * len(sizes)


def test_written_pieces(here):
    data = content(3, 100_000)
    pieces = [place(part)[0] for part in np.array_split(data, 1500)]
    pieces[7:7] = [(0, 0), (data.ctypes.data, 0)]
    places = [pieces, [], [(0, 0)], pieces[::-1]]
    assert here.near.write_objects(here.peer, keys(1, 2, 3, 4), places).tolist() == [DONE] * 4
    assert here.stored(1) == data.tobytes()
    assert here.stored(2) == here.stored(3) == b""
    assert here.stored(4) == np.concatenate(np.array_split(data, 1500)[::-1]).tobytes()


def test_1024_objects_are_written_and_removed(here):
    objects = {i: content(i, i % 41 * 50) for i in range(1024)}
    assert here.write(objects) == [DONE] * 1024
    assert here.read(*objects) == [data.tobytes() for data in objects.values()]
    assert here.remove(*objects) == [DONE] * 1024
    assert here.remove(*objects) == [ABSENT] * 1024
    assert here.pool.stats().num_ready == 0


def test_a_mixed_batch():
    capacity = 1 << 20
    with serving(capacity) as here:
        old = here.put(1, 1000).tobytes()
        put = here.begin(2, 100)
        objects = {
            1: content(11, 1000),
            2: content(2, 100),
            3: content(3, 5000),
            4: content(4, capacity + 1),
            5: content(5, capacity),
            6: content(6, 0),
            7: content(7, 70_000),
        }
        before = here.pool.counts()
        expected = [EXISTS, BEING_WRITTEN, DONE, TOO_LARGE, FULL, DONE, DONE]
        assert here.write(objects) == expected
        put.abort()
        assert here.stored(1) == old
        for number in (3, 6, 7):
            assert here.stored(number) == objects[number].tobytes()
        assert all(here.stored(number) is None for number in (2, 4, 5))
        assert here.write({2: objects[2]}) == [DONE]
        counts = here.pool.counts() - before
        assert (counts.num_stored, counts.stored_bytes) == (4, 75_100)


def test_duplicate_key_in_one_batch(here):
    places = [place(content(1, 100)), place(content(2, 200))]
    result = here.near.write_objects(here.peer, keys(1, 1), places)
    assert result.tolist() == [DONE, BEING_WRITTEN]
    assert here.stored(1) == content(1, 100).tobytes()


def test_first_of_concurrent_writers_wins(here):
    data = [content(i, 200_000) for i in range(6)]
    for number in range(10):
        results = [r for [r] in in_threads(*(partial(here.write, {number: one}) for one in data))]
        assert results.count(DONE) == 1
        assert set(results) <= {DONE, EXISTS, BEING_WRITTEN}
        assert here.stored(number) == data[results.index(DONE)].tobytes()


def test_the_largest_payload():
    with serving(2 * MOST) as here:
        data = content(1, MOST)
        assert here.write({1: data}) == [DONE]
        assert here.pool.stats().num_ready == 1 and here.stored(1) == data.tobytes()


def test_payload_beyond_the_limit_is_rejected():
    with serving(2 * MOST) as here:
        here.put(1, 100)
        with pytest.raises(InvalidArgument, match="write_objects: objects must be"):
            here.write({2: content(2, MOST + 1)})
        assert here.read(1) == [content(1, 100).tobytes()]


def test_read_only_service_rejects_writes():
    with serving(may_write=False) as here:
        data = here.put(1, 100)
        for size in (0, 1000, 1 << 20):
            with pytest.raises(Unavailable, match="its objects may only be read"):
                here.write({2: content(2, size)})
        with pytest.raises(Unavailable, match="its objects may only be read"):
            here.remove(1)
        assert here.read(1, 2) == [data.tobytes(), ABSENT]
        assert here.pool.stats().num_ready == 1
        counts = here.pool.counts()
        assert (counts.num_stored, counts.num_removed) == (1, 0)


def test_paused_service_rejects_writes(here):
    here.put(1, 100)
    here.served.let_put(False)
    for size in (0, 1000):
        with pytest.raises(Unavailable, match="it takes no objects at the moment"):
            here.write({2: content(2, size)})
    assert here.remove(1) == [DONE]
    assert here.is_at_rest() and here.pool.stats().num_ready == 0
    here.served.let_put(True)
    assert here.write({2: content(2, 1000)}) == [DONE]
    with pytest.raises(InvalidArgument, match="let_put: takes_puts must be True or False, got 1"):
        here.served.let_put(1)
    with serving(may_write=False) as only_read:
        only_read.served.let_put(True)
        with pytest.raises(Unavailable, match="its objects may only be read"):
            only_read.write({2: content(2, 10)})


def test_acknowledged_writes_are_visible_after_pausing(here):
    """Writers go on until they are refused; then the pool has what was acknowledged."""
    stored, numbers = [], itertools.count(1)

    def write(_):
        with contextlib.suppress(Unavailable):
            while True:
                number = next(numbers)
                assert here.write({number: content(number, 100)}) == [DONE]
                stored.append(number)

    def end():
        eventually(lambda: len(stored) > 50)
        here.served.let_put(False)
        while here.pool.stats().num_writing:
            pass
        return here.pool.stats().num_ready

    with ThreadPoolExecutor(1) as executor:
        num_ready = executor.submit(end)
        in_threads(*(partial(write, i) for i in range(2)))
    assert num_ready.result() == len(stored) == here.pool.stats().num_ready


def test_removing(here):
    here.put(1, 100)
    with serving(2 * LARGE) as here:
        data = here.put(1, LARGE)
        here.put(2, 10)
        with here.ask(1) as reply:
            assert here.remove(1, 3, 2, 2, 1) == [DONE, ABSENT, DONE, ABSENT, ABSENT]
            assert here.pool.stats().num_ready == 0
            got = untouched(LARGE)
            assert reply.receive([place(got)], verify=True).all()  # who reads it keeps it
        assert (got == data).all()
        eventually(lambda: here.pool.stats().num_doomed == 0)
