"""Counters of objects, and what is reported of peers."""

import pytest

from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import PoolCounts
from mooncake_kernels.transfer import WHOLE

from .objects import (
    ABSENT,
    ANSWER,
    DONE,
    LARGE,
    content,
    here_fixture,  # noqa: F401
    serving,
)


def test_requests_and_read_bytes_are_counted(here):
    here.put(1, 1000)
    with here.ask(1) as reply:
        assert here.near.stats()["peers"][here.far.name]["num_in_flight"] == 1
        reply.receive([[]], verify=True)
    here.read(2)
    here.far.serve(None)
    with pytest.raises(Unavailable):
        here.read(1)
    stats = here.near.stats()
    counters = stats["peers"][here.far.name]
    assert counters["num_bytes_read"] == 1000 + 2 * ANSWER.size
    assert counters["num_in_flight"] == counters["num_bytes_in_flight"] == 0
    assert (counters["num_requests"], counters["num_errors"]) == (3, 1)
    path = stats["paths"][here.far.name]["rpc"]
    assert (path["num_bytes_read"], path["num_pieces"]) == (1000 + 2 * ANSWER.size, 2)


def test_written_bytes_are_counted(here):
    assert here.write({1: content(1, 1000), 2: content(2, 24)}) == [DONE, DONE]
    stats = here.near.stats()
    assert stats["paths"][here.far.name]["rpc"]["num_bytes_written"] == 1024
    assert stats["peers"][here.far.name]["num_bytes_written"] == 1024


def test_failed_requests_are_counted(here):
    with serving(2 * LARGE) as here:
        here.put(1, LARGE)
        with here.ask(1) as reply:
            here.far.close()
            with pytest.raises(TransferError):
                reply.receive([[]], verify=True)
        with pytest.raises(TransferError):
            here.read(1)
        counters = here.near.stats()["peers"][here.far.name]
        assert (counters["num_in_flight"], counters["num_errors"]) == (0, 2)


def test_served_requests_are_reported_by_take(here):
    for number, size in ((1, 1000), (2, 50)):
        here.put(number, size)
    here.read(1, 2, 3, offsets=[WHOLE, 10, WHOLE], sizes=[WHOLE, 20, WHOLE])
    with here.ask(1) as reply:
        assert reply.statuses.tolist() == [DONE]
    assert here.write({4: content(4, 30), 5: content(5, 7), 1: content(1, 9)})[:2] == [DONE, DONE]
    assert here.remove(2, 9, 4) == [DONE, ABSENT, DONE]
    assert here.write({2: content(2, 3)}) == [DONE]
    assert here.pool.counts() == PoolCounts(3, 1, 5, 2, 0, 2020, 1090)
    taken = here.served.take()
    assert len(taken.read) == 0 and not taken.is_listed_in_vain
