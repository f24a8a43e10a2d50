"""A cable that loses, delays, reorders, duplicates and corrupts packets, in both directions."""

import pytest

from ..support import WAIT_S
from .hosts import transfers, two_hosts

CABLES = {
    "loss_1": "loss 1%",
    "loss_5": "loss 5%",
    "delay": "delay 50ms 20ms",
    "reorder": "delay 10ms reorder 25% 50%",
    "duplicate": "duplicate 5%",
    "corrupt": "corrupt 1%",
    "all": "delay 10ms 5ms loss 1% duplicate 1% corrupt 0.5%",
}


@pytest.fixture(scope="module")
def both():
    """One for all, for in the guest it takes a second to make."""
    with two_hosts() as hosts, transfers(hosts) as started:
        yield started


@pytest.mark.parametrize("cable", CABLES.values(), ids=CABLES.keys())
@pytest.mark.parametrize("direction", ["write", "read"])
def test_bytes_arrive(both, cable, direction):
    both.hosts.both(f"tc qdisc replace dev wire root netem limit 10000 {cable}")
    both.start(direction, key=len(cable), deadline_s=3 * WAIT_S).wait()
    both.check(direction, key=len(cable))
