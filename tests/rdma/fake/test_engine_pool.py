"""More peers than connections: idle queue pairs are closed for others, and reopened on demand."""

import contextlib
import random
import time

import numpy as np
import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from .engines import ALL, UNTOUCHED, topology_of
from .pairs import addressed

SIZE = 1 << 16
MOST, NUM_PEERS = 3, 7
PAIRS = 2 * 2  # of a connection: two NICs, both ends


@contextlib.contextmanager
def engines(**options):
    with contextlib.ExitStack() as stack:
        own = {"transports": ["rdma"], "topology": topology_of(ALL[:2])}
        near = stack.enter_context(TransferEngine(**own, **options))
        other = {"transports": ["rdma"], "topology": topology_of(ALL[2:])}
        yield near, [stack.enter_context(TransferEngine(**other)) for _ in range(NUM_PEERS)]


def queue_pairs(world, at_most: int) -> int:
    """Count them when there are not too many any more: the other end takes its time to close."""
    deadline = time.monotonic() + 10
    while (count := world.live()["queue pair"]) > at_most and time.monotonic() < deadline:
        time.sleep(0.01)
    return count


def test_more_peers_than_max_connections(world):
    with engines(max_connections=MOST) as (near, far):
        here = addressed(SIZE)
        here_at = near.register(here).address
        there = [np.full(SIZE, UNTOUCHED, np.uint8) for _ in far]
        there_at = [
            engine.register(memory).address for engine, memory in zip(far, there, strict=True)
        ]
        peers = [near.open(engine.name) for engine in far]
        rng = random.Random(5)
        for _ in range(100):
            i = rng.randrange(NUM_PEERS)
            there[i][:] = UNTOUCHED
            near.write(peers[i], [(here_at, there_at[i], SIZE)], notify=b"x").wait()
            np.testing.assert_array_equal(there[i], here)
            assert far[i].receive_notifications(10.0) == [(near.name, b"x")]
        assert queue_pairs(world, at_most=MOST * PAIRS) == MOST * PAIRS
        paths = near.stats()["paths"]
        assert all(p["num_failures"] == 0 for e in far for p in paths[e.name].values())


def test_peer_in_use_keeps_its_connection(world):
    with engines(max_connections=1) as (near, (first, second, *_)):
        here, there = addressed(SIZE), np.full(SIZE, UNTOUCHED, np.uint8)
        row = [(near.register(here).address, first.register(there).address, SIZE)]
        peer = near.open(first.name)
        with world.held() as let:
            ticket = near.write(peer, row)
            with pytest.raises(TransferError, match=r"all 1 connections .* are in use"):
                near.open(second.name, deadline_s=0.3)
            let(1000)
        ticket.wait()
        np.testing.assert_array_equal(there, here)
        with near.open(second.name):
            assert queue_pairs(world, at_most=PAIRS) == PAIRS
        near.write(peer, row).wait()
