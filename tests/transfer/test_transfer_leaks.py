"""Many small transfers leak nothing. ``--soak`` makes it 10 million; tcp a million."""

import sys
from collections import deque

import numpy as np
import pytest

from .objects import ABSENT, DONE, content, serving
from .resources import assert_no_growth, held, settled
from .support import addressed, engine_pair, untouched

NUM_TRANSFERS = {"local": 100_000, "shm": 80_000, "tcp": 20_000}
NUM_SOAK = {"local": 10_000_000, "shm": 10_000_000, "tcp": 1_000_000}
WARM_UP = 10_000
UNDER_WAY = 32  # requests at a time
SIZE, BLOCK = 1 << 16, 64


def transfer(pair, near: int, far: int, count: int) -> None:
    """Move blocks there and back, one a request, a few requests at a time."""
    under_way: deque = deque()
    for number in range(count):
        move = pair.near.read if number & 1 else pair.near.write
        at = (number >> 1) * BLOCK % SIZE
        under_way.append(move(pair.peer, [(near + at, far + at, BLOCK)]))
        if len(under_way) == UNDER_WAY:
            under_way.popleft().wait()
    for ticket in under_way:
        ticket.wait()


@pytest.mark.parametrize("transport", NUM_TRANSFERS)
def test_transfers_leak_no_resources(transport, soak):
    count = (NUM_SOAK if soak else NUM_TRANSFERS)[transport]
    with engine_pair(transport) as pair:
        here, there = addressed(SIZE), untouched(SIZE)
        near, far = (region.address for region in pair.regions(here, there))
        transfer(pair, near, far, WARM_UP)
        before = held()
        transfer(pair, near, far, count)
        after = held()
        for memory in (here, there):
            np.testing.assert_array_equal(memory, addressed(SIZE))
        counters = pair.near.stats()["transports"][transport]
    sys.stdout.write(f"{transport}: {count} transfers\nbefore: {before}\nafter: {after}\n")
    assert counters["num_requests"] == WARM_UP + count and counters["num_errors"] == 0
    assert_no_growth(before, after)


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_object_requests_leak_no_resources(transport):
    with serving(transport=transport) as here:
        data = here.put(1, 5000).tobytes()

        def work(count):
            for turn in range(count):
                assert here.read(1, 2) == [data, ABSENT]
                assert here.write({3: content(3, 100)}) == [DONE]
                assert here.remove(3) == [DONE]
                if turn % 10 == 0:
                    here.ask(1).close()

        work(50)
        before = held()
        work(500)
        assert settled(before)
        assert_no_growth(before, held())
        here.served.take()
