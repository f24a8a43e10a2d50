"""The network between two hosts goes away and comes back: nothing hangs, nothing lands late."""

import time
from dataclasses import dataclass

import pytest

from mooncake_kernels import config
from mooncake_kernels.errors import TransferError

from ..support import WAIT_S, eventually
from .hosts import FAR, NEAR, transfers

NOBODY = "02:00:00:00:00:01"  # frames for this address are dropped silently
# All takes 1.7 s by it: a busy machine may be late to begin an outage in the middle.
SLOW = "tc qdisc replace dev wire root tbf rate 20mbit burst 64k latency 50ms"
FAST = "tc qdisc replace dev wire root tbf rate 1gbit burst 1m latency 50ms"


@dataclass(frozen=True)
class Outage:
    """What happens to which host, and how that is repaired."""

    host: str
    begins: str
    ends: str

    def begin(self, hosts) -> None:
        getattr(hosts, self.host)(self.begins)

    def end(self, hosts) -> None:
        getattr(hosts, self.host)(self.ends)


def link_down(host: str) -> Outage:
    return Outage(host, "ip link set wire down", "ip link set wire up")


def address_gone(host: str, address: str) -> Outage:
    return Outage(host, f"ip addr del {address}/24 dev wire", f"ip addr add {address}/24 dev wire")


def packets_lost(host: str, to: str) -> Outage:
    """In one direction only."""
    return Outage(
        host,
        f"ip neigh replace {to} lladdr {NOBODY} dev wire nud permanent",
        f"ip neigh del {to} dev wire",
    )


OUTAGES = {
    "near_link_down": link_down("near"),
    "far_link_down": link_down("far"),
    "near_address_gone": address_gone("near", NEAR),
    "far_address_gone": address_gone("far", FAR),
    "near_to_far_lost": packets_lost("near", FAR),
    "far_to_near_lost": packets_lost("far", NEAR),
}


@pytest.fixture(params=OUTAGES.values(), ids=OUTAGES.keys())
def outage(request):
    return request.param


@pytest.mark.parametrize("direction", ["write", "read"])
def test_a_short_outage_is_survived(both, outage, direction):
    both.hosts.both(SLOW)
    ticket = both.start(direction)
    eventually(lambda: both.begun(direction))
    outage.begin(both.hosts)
    time.sleep(0.2)
    assert not ticket.done
    outage.end(both.hosts)
    both.hosts.both(FAST)
    ticket.wait()
    both.check(direction)


def test_long_outage_is_reported_and_peer_recovers(both, outage):
    both.hosts.both(SLOW)
    ticket = both.start("write", key=1, deadline_s=0.5)
    eventually(lambda: both.begun("write"))
    outage.begin(both.hosts)
    with pytest.raises(TransferError, match=r"deadline of 0.5 s passed") as caught:
        ticket.wait(WAIT_S)
    both.check_partly("write", 1, caught.value.num_bytes_done)
    with pytest.raises(TransferError):
        both.engine.open(both.hosts.name, deadline_s=0.2)
    outage.end(both.hosts)
    both.hosts.both(FAST)
    both.start("write", key=2).wait()
    both.check("write", key=2)
    time.sleep(0.3)  # what the connection before had under way is sent again by now
    both.check("write", key=2)
    both.start("read", key=3).wait()
    both.check("read", key=3)


def test_closing_does_not_wait_for_the_network(both, outage):
    both.hosts.both(SLOW)
    ticket = both.start("write")
    eventually(lambda: both.begun("write"))
    outage.begin(both.hosts)
    start = time.monotonic()
    both.engine.close()
    assert time.monotonic() - start < WAIT_S
    with pytest.raises(TransferError, match="the engine was closed"):
        ticket.wait()


@pytest.mark.parametrize("host", ["near", "far"])
@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("lanes", [1, 4])
def test_reset_connections_are_replaced(hosts, host, direction, lanes):
    """All at once, in the middle: as who stands between does when it forgets its connections."""
    with config.override(transfer_lanes=lanes), transfers(hosts) as both:
        hosts.both(SLOW)
        ticket = both.start(direction)
        eventually(lambda: both.begun(direction))
        peer = FAR if host == "near" else NEAR
        getattr(hosts, host)(f"ss --tcp --ipv4 --kill --no-header dst {peer}")
        hosts.both(FAST)
        ticket.wait()
        both.check(direction)
