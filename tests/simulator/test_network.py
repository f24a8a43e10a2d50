"""NICs that share: closed forms, conservation of bytes, failures; and the clock below them."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serving.conductor import InvalidArgument
from mooncake_simulator.events import Clock
from mooncake_simulator.network import Network, Nic


def test_simultaneous_events_run_in_scheduling_order():
    clock, seen = Clock(), []
    clock.at(2.0, seen.append, "late")
    clock.at(1.0, seen.append, "first")
    gone = clock.at(1.0, seen.append, "never")
    clock.at(1.0, seen.append, "second")
    gone.cancel()
    clock.run(until=1.5)
    assert seen == ["first", "second"] and clock.now == 1.5
    clock.run()
    assert seen == ["first", "second", "late"] and clock.now == 2.0
    clock.at(9.0, seen.append, "never").cancel()
    clock.run()
    assert clock.now == 2.0 and clock.num_events == 3
    with pytest.raises(ValueError, match=r"time must be >= 2\.0"):
        clock.at(1.0, seen.append, "past")


def test_two_flows_share_the_rate_of_a_nic():
    clock = Clock()
    network = Network(clock)
    a, b, c = Nic(100.0), Nic(100.0), Nic(50.0)
    done = {}
    network.send(a, b, 100, lambda: done.setdefault("ab", clock.now))
    network.send(a, c, 100, lambda: done.setdefault("ac", clock.now))
    clock.run()
    # both have 50 B/s of a's 100 until 2 s
    assert done == {"ab": pytest.approx(2.0), "ac": pytest.approx(2.0)}
    network.send(b, c, 100, lambda: done.setdefault("bc", clock.now))
    clock.run()
    assert done["bc"] == pytest.approx(4.0)  # c receives no faster


def test_later_flow_slows_the_earlier_one():
    clock, done = Clock(), {}
    network, a, b = Network(clock), Nic(10.0), Nic(10.0)
    network.send(a, b, 100, lambda: done.setdefault("first", clock.now))
    second = lambda: done.setdefault("second", clock.now)  # noqa: E731
    clock.at(5.0, network.send, a, b, 100, second)
    clock.run()
    assert done == {"first": pytest.approx(15.0), "second": pytest.approx(20.0)}


def test_failed_machine_loses_its_flows_and_others_speed_up():
    clock, done, lost = Clock(), {}, []
    network, a, b, c = Network(clock), Nic(10.0), Nic(10.0), Nic(10.0)
    network.send(a, b, 100, lambda: done.setdefault("ab", clock.now), lambda: lost.append("ab"))
    network.send(a, c, 100, lambda: done.setdefault("ac", clock.now), lambda: lost.append("ac"))
    clock.at(2.0, network.fail, b)
    clock.run()
    assert lost == ["ab"] and done == {"ac": pytest.approx(2 + 90 / 10)}
    assert a.sent_bytes == pytest.approx(110) and b.received_bytes == pytest.approx(10)


flows = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 3), st.floats(0, 1000), st.floats(0, 50)),
    max_size=25,
)


@given(flows=flows)
@settings(max_examples=80, deadline=None)
def test_bytes_are_conserved_and_no_nic_exceeds_its_rate(flows):
    clock = Clock()
    network, nics = Network(clock), [Nic(100.0), Nic(50.0), Nic(20.0), Nic(100.0)]
    ends = []
    for src, dst, num_bytes, at in flows:
        clock.at(at, network.send, nics[src], nics[dst], num_bytes, lambda: ends.append(clock.now))
    clock.run()
    assert len(ends) == len(flows)
    moved = [(s, d, n) for s, d, n, _ in flows if s != d]
    for i, nic in enumerate(nics):
        assert nic.sent_bytes == pytest.approx(sum(n for s, _, n in moved if s == i))
        assert nic.received_bytes == pytest.approx(sum(n for _, d, n in moved if d == i))
        assert nic.sent_bytes <= nic.bytes_per_s * max(ends, default=0) * (1 + 1e-9) + 1e-6
        assert not nic.outbound and not nic.inbound


def test_nic_without_a_rate_is_rejected():
    with pytest.raises(InvalidArgument, match="bytes_per_s must be > 0, got 0"):
        Nic(0)
