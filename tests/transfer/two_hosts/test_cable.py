"""Two hosts and a good cable between them, or a slow one."""

import numpy as np
import pytest

from mooncake_kernels import config
from mooncake_kernels.errors import TransferError

from ..support import WAIT_S
from .hosts import SIZE, content, transfers


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("lanes", [1, 3])
def test_bytes_arrive(hosts, direction, lanes):
    with config.override(transfer_lanes=lanes), transfers(hosts) as both:
        both.start(direction).wait()
        both.check(direction)


def test_both_directions_at_once(both):
    half = SIZE // 2
    here, there = both.region._buffer.owner, both.hosts.memory
    here[:half], there[half:] = content(1)[:half], content(2)[half:]
    near, far = both.region.address, both.hosts.address
    tickets = [
        both.engine.write(both.peer, [(near, far, half)]),
        both.engine.read(both.peer, [(near + half, far + half, half)]),
    ]
    for ticket in tickets:
        ticket.wait()
    want = np.concatenate([content(1)[:half], content(2)[half:]])
    for memory in (here, there):
        np.testing.assert_array_equal(memory, want)


@pytest.mark.parametrize("direction", ["write", "read"])
def test_slow_link_times_out_and_recovers(both, direction):
    both.hosts.both("tc qdisc add dev wire root tbf rate 40mbit burst 32k latency 20ms")
    with pytest.raises(TransferError, match=r"deadline of 0.3 s passed") as caught:
        both.start(direction, key=1, deadline_s=0.3).wait(WAIT_S)
    both.check_partly(direction, 1, caught.value.num_bytes_done)
    both.start(direction, key=2).wait()
    both.check(direction, key=2)
