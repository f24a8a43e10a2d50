"""Whole objects of a peer's pool, read straight into memory."""

import numpy as np
import pytest

from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.transfer import ObjectStatus

from .objects import (
    content,
    here_fixture,  # noqa: F401
    key,
    keys,
    place,
    serving,
    through,
)
from .support import UNTOUCHED, eventually, untouched


def read_into(here, numbers, arrays, **options) -> list[int]:
    places = [place(array) for array in arrays]
    return here.near.read_objects_into(here.peer, keys(*numbers), places, **options).tolist()


@pytest.mark.parametrize("transport", ["tcp", "shm"])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("checksum", [True, False])
def test_objects_are_read_into_given_memory(transport, verify, checksum):
    sizes = [1, 0, 4096, 100_000, (5 << 20) + 1]
    with serving(transport=transport) as here:
        for i, size in enumerate(sizes):
            here.put(i, size, checksum=checksum)
        arrays = [untouched(size + 3) for size in sizes]
        assert read_into(here, range(5), arrays, verify=verify) == sizes
        for i, (array, size) in enumerate(zip(arrays, sizes, strict=True)):
            assert (array[:size] == content(i, size)).all()
            assert (array[size:] == UNTOUCHED).all()
        eventually(here.is_at_rest)


def test_object_is_read_into_pieces(here):
    data, memory = here.put(1, 1000), untouched(2000)
    pieces = [place(part)[0] for part in np.array_split(memory, 7)]
    pieces[2:2] = [(0, 0), (memory.ctypes.data, 0)]
    assert here.near.read_objects_into(here.peer, [key(1)], [pieces]).tolist() == [1000]
    assert (memory[:1000] == data).all() and (memory[1000:] == UNTOUCHED).all()


def test_missing_or_damaged_objects_do_not_fail_the_others(here):
    here.put(1, 100)
    here.put(2, 100)
    here.damage(2)
    here.put(3, 100)
    arrays = [untouched(100), untouched(100), untouched(99), untouched(100), untouched(100)]
    assert read_into(here, [9, 2, 3, 1, 1], arrays) == [-1, -1, -1, 100, 100]
    for i in (0, 2):
        assert (arrays[i] == UNTOUCHED).all()
    assert (arrays[3] == content(1, 100)).all() and (arrays[4] == content(1, 100)).all()
    assert read_into(here, [2], arrays[:1], verify=False) == [100]
    eventually(here.is_at_rest)


def test_objects_beyond_one_response_are_left_out():
    with serving(160 << 20) as here:
        here.put(1, 40 << 20)
        here.put(2, 40 << 20)
        arrays = [untouched(40 << 20) for _ in range(2)]
        sizes = read_into(here, [1, 2], arrays)
        assert sorted(sizes) == [-1, 40 << 20]  # the other one is to be asked for again


def test_alternative_argument_forms(here):
    data = here.put(1, 100)
    here.put(2, 50)
    first, other = untouched(100), untouched(50)
    [(address, size)] = place(first)
    for words, places, options in (
        ([key(1), key(2)], ([(address, size)], place(other)), {}),
        (np.array([key(1), key(2)], ">u8"), [((address, size),), place(other)], {}),
        (keys(1, 0, 2)[::2], [[[np.uint64(address), size]], place(other)], {"answer_s": 5}),
        (keys(1, 2), [[(address, size)], place(other)], {"deadline_s": np.float32(5)}),
    ):
        other[:] = UNTOUCHED
        sizes = here.near.read_objects_into(here.peer, words, places, **options)
        assert sizes.dtype == np.int64 and sizes.tolist() == [100, 50]
        assert (other == content(2, 50)).all()
    for words, places, options in (
        ([key(3)], ([(address, size)],), {}),
        (keys(4), [((address, size),)], {"deadline_s": 5}),
        (keys(5), [[(address, size)]], {}),
    ):
        written = here.near.write_objects(here.peer, words, places, **options)
        assert written.dtype == np.uint8 and written.tolist() == [ObjectStatus.DONE]
    read = [untouched(100) for _ in range(3)]
    assert read_into(here, [3, 4, 5], read) == [100] * 3
    assert all((array == data).all() for array in read)


def test_wrong_arguments(here):
    here.put(1, 100)
    read = here.near.read_objects_into
    memory = untouched(100)
    for places, message in (
        ([], "places must be 1, got 0"),
        ([[], []], "places must be 1, got 2"),
        (None, r"places must be 1 lists of \(address, num_bytes\), got None"),
        ([[5]], r"places must be 1 lists of \(address, num_bytes\), got "),
    ):
        with pytest.raises(InvalidArgument, match=f"read_objects_into: {message}"):
            read(here.peer, [key(1)], places)
    with pytest.raises(InvalidArgument, match="read_objects_into: keys must be 1 to 1024, got 0"):
        read(here.peer, [], [])
    with pytest.raises(InvalidArgument, match="read_objects_into: verify must be"):
        read(here.peer, [key(1)], [place(memory)], verify=1)
    for option in ("answer_s", "deadline_s"):
        with pytest.raises(InvalidArgument, match=f"read_objects_into: {option} must be"):
            read(here.peer, [key(1)], [place(memory)], **{option: 0})
    assert (memory == UNTOUCHED).all()


def test_read_fails_when_peer_serves_nothing_or_is_gone(here):
    here.put(1, 100)
    memory = untouched(100)
    here.served.close()
    with pytest.raises(Unavailable, match="read_objects_into|read_objects"):
        read_into(here, [1], [memory])
    here.far.close()
    with pytest.raises(TransferError):
        read_into(here, [1], [memory], deadline_s=5)


def test_deadline_covers_the_response(here):
    here.put(1, 100)
    with through(here) as (here, proxy):
        with here.ask(99):
            pass
        proxy.relays[1].down.hold(0)
        with pytest.raises(TransferError) as late:
            read_into(here, [1], [untouched(100)], answer_s=600.0, deadline_s=0.3)
        assert late.value.timed_out
        proxy.relays[1].down.release()
        eventually(here.is_at_rest)
