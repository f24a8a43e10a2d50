"""Whole objects of a peer, and ranges of them."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.transfer import WHOLE

from .objects import (
    ABSENT,
    BUSY,
    DOES_NOT_FIT,
    DONE,
    ELSEWHERE,
    MOST,
    TOO_LARGE,
    content,
    here_fixture,  # noqa: F401
    kept_fixture,  # noqa: F401
    place,
    serving,
)
from .support import eventually, untouched


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("checksum", [True, False])
def test_objects_arrive_intact(transport, checksum):
    sizes = [1, 0, 2, 4095, 4096, 4097, 0, 65536, 1 << 20, (3 << 20) + 1]
    with serving(16 << 20, transport) as here:
        objects = [here.put(i, size, checksum).tobytes() for i, size in enumerate(sizes)]
        assert here.read(*range(len(sizes))) == objects
        for i, data in enumerate(objects):
            assert here.read(i) == [data]
        with here.ask(*range(len(sizes))) as reply:
            assert reply.statuses.dtype == np.uint8 and reply.object_bytes.dtype == np.uint64
            assert reply.object_bytes.tolist() == sizes


@given(
    ranges=st.lists(
        st.tuples(st.integers(0, 100_010), st.integers(0, 100_010)), min_size=1, max_size=20
    )
)
@settings(max_examples=60, deadline=None)
def test_ranges_of_an_object(kept, ranges):
    data = content(1, 100_000).tobytes()
    offsets, sizes = (list(column) for column in zip(*ranges, strict=True))
    expected = [
        data[at : at + size] if at + size <= len(data) else DOES_NOT_FIT for at, size in ranges
    ]
    assert kept.read(*[1] * len(ranges), offsets=offsets, sizes=sizes) == expected


@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 100_001), (100_000, 1), (100_001, 0), (1, WHOLE), (WHOLE - 1, 2), (WHOLE - 1, WHOLE)],
)
def test_range_beyond_the_object_does_not_fit(kept, offset, size):
    with kept.ask(1, offsets=[offset], sizes=[size]) as reply:
        assert reply.statuses.tolist() == [DOES_NOT_FIT]
        assert reply.object_bytes.tolist() == [100_000]
        assert reply.receive([[]], verify=True).tolist() == [True]


def test_object_larger_than_its_room_does_not_fit(kept):
    for room, status in ((0, DOES_NOT_FIT), (99_999, DOES_NOT_FIT), (100_000, DONE), (WHOLE, DONE)):
        with kept.ask(1, sizes=[room]) as reply:
            assert reply.statuses.tolist() == [status]
            assert reply.object_bytes.tolist() == [100_000]


@given(
    cuts=st.lists(st.integers(0, 100_000), max_size=1500),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_pieces_of_all_sizes(kept, cuts, seed):
    """Those of an object in any order in memory, also empty ones, also more than IOV_MAX."""
    bounds = [0, *sorted(cuts), 100_000]
    sizes = np.diff(bounds)
    order = np.random.default_rng(seed).permutation(len(sizes))
    gapped = np.zeros(len(sizes), np.int64)
    gapped[order] = np.concatenate([[0], np.cumsum(sizes[order] + 1)[:-1]])
    memory, expected = untouched(100_000 + len(sizes)), untouched(100_000 + len(sizes))
    for start, at, size in zip(gapped, bounds, sizes, strict=False):
        expected[start : start + size] = content(1, 100_000)[at : at + size]
    base = memory.ctypes.data
    pieces = [(base + int(at), int(size)) for at, size in zip(gapped, sizes, strict=True)]
    with kept.ask(1) as reply:
        assert reply.receive([pieces], verify=True).tolist() == [True]
    np.testing.assert_array_equal(memory, expected)


def test_missing_objects_are_absent(here):
    data = here.put(1, 1000).tobytes()
    put = here.begin(3, 100)
    assert here.read(0, 1, 2, 3) == [ABSENT, data, ABSENT, ABSENT]
    with here.ask(0, 3) as reply:
        assert reply.object_bytes.tolist() == [0, 0]
    put.abort()
    assert here.pool.counts().num_misses == 5


def test_missing_objects_of_partial_service_may_be_elsewhere():
    with serving(is_all=False) as here:
        data = here.put(1, 1000).tobytes()
        assert here.read(1, 2) == [data, ELSEWHERE]


def test_unwanted_objects_are_discarded(here):
    first, last = here.put(1, 70_000), here.put(3, 5)
    here.put(2, 1 << 20)
    with here.ask(1, 2, 3) as reply:
        arrays = untouched(70_000), untouched(5)
        places = [place(arrays[0]), [], place(arrays[1])]
        assert reply.receive(places, verify=True).all()
    assert (arrays[0] == first).all() and (arrays[1] == last).all()
    with here.ask(1, 2, 3) as reply:
        assert reply.receive([[], [], []], verify=True).all()
    assert here.read(3) == [last.tobytes()]


def test_largest_response():
    with serving(3 * MOST, pool={"alignment": 64}) as here:
        data = here.put(1, MOST).tobytes()
        here.put(2, MOST + 1)
        assert here.read(1) == [data]
        with here.ask(2) as reply:
            assert reply.statuses.tolist() == [TOO_LARGE]
            assert reply.object_bytes.tolist() == [MOST + 1]
        tail = content(2, MOST + 1)[MOST - 99 :].tobytes()
        assert here.read(2, offsets=[MOST - 99], sizes=[100]) == [tail]
        with here.ask(2, offsets=[0], sizes=[MOST + 1]) as reply:
            assert reply.statuses.tolist() == [TOO_LARGE]


def test_objects_beyond_one_response_are_busy():
    rest = 24 << 20
    with serving(3 * MOST) as here:
        sizes = {1: MOST - rest + 1, 2: 30 << 20, 3: 10 << 20, 4: MOST + 1, 5: 100, 6: 0}
        for number, size in sizes.items():
            here.put(number, size)
        with here.ask(*sizes) as reply:
            assert reply.statuses.tolist() == [BUSY, DONE, DONE, BUSY, DONE, DONE]
            assert reply.object_bytes.tolist() == list(sizes.values())
        with here.ask(2, 4) as reply:
            assert reply.statuses.tolist() == [DONE, TOO_LARGE]
        for size, status in ((MOST - rest, DONE), (MOST - rest + 1, BUSY)):
            with here.ask(1, 2, offsets=[0, 0], sizes=[size, rest]) as reply:
                assert reply.statuses.tolist() == [status, DONE]


def test_1024_objects_in_one_request(here):
    numbers = range(1024)
    objects = [here.put(i, i % 37 * 100).tobytes() for i in numbers]
    assert here.read(*numbers) == objects
    assert here.read(*[5] * 1024) == [objects[5]] * 1024
    assert here.read(*range(1024, 2048)) == [ABSENT] * 1024


def test_more_objects_than_pins_are_busy():
    with serving(pool={"num_pins": 3}) as here:
        for number in range(5):
            here.put(number, 100)
        with here.ask(*range(5)) as reply:
            assert reply.statuses.tolist() == [BUSY, BUSY, DONE, DONE, DONE]
        eventually(here.is_at_rest)  # the senders release them a little later
        assert here.read(0, 1) == [content(i, 100).tobytes() for i in (0, 1)]
