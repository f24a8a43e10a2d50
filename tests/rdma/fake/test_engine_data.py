"""The engine over several NICs: every byte where it belongs, then the notifications."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels import TransferError, config
from mooncake_kernels.transfer import TransferEngine

from .engines import ALL, UNTOUCHED, engines, topology_of
from .pairs import addressed

DIRECTIONS = ("write", "read")


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("size", [1, 63, 4096, 4097, (1 << 20) + 1, (16 << 20) - 1, (40 << 20) + 3])
def test_one_block(direction, size):
    with engines(size + 10) as pair:
        assert pair.peer.transport == "rdma"
        pair.move(direction, [(3, 5, size)])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_large_transfer_of_up_to_one_gib(direction, soak):
    """A quarter of one without --soak; from and to odd addresses, each word of it another."""
    size = (1 << 30 if soak else 1 << 28) + 5
    source = np.arange(size // 8 + 2, dtype=np.uint64)
    source *= np.uint64(0x9E3779B97F4A7C15)
    source, target = source.view(np.uint8), np.full(size + 8, UNTOUCHED, np.uint8)
    with engines() as pair:
        near, far = (source, target) if direction == "write" else (target, source)
        here, there = pair.near.register(near), pair.far.register(far)
        at = (1, 3) if direction == "write" else (3, 1)
        rows = [(here.address + at[0], there.address + at[1], size)]
        getattr(pair.near, direction)(pair.peer, rows).wait()
    for i in range(0, size, 1 << 20):
        end = min(i + (1 << 20), size)
        assert np.array_equal(target[3 + i : 3 + end], source[1 + i : 1 + end])
    assert (target[:3] == UNTOUCHED).all() and (target[3 + size :] == UNTOUCHED).all()


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({}, {"sgid_index": 1, "traffic_class": 0, "sl": 0}),
        ({"rdma_gid_index": 0}, {"sgid_index": 0}),
        ({"rdma_traffic_class": 104, "rdma_service_level": 3}, {"traffic_class": 104, "sl": 3}),
    ],
)
def test_queue_pair_settings_are_applied(world, settings, field):
    """At both ends."""
    with config.override(**settings), engines() as pair:
        pair.move("write", [(0, 0, 100)])
        ready = [call for call in world.log("ibv_modify_qp") if call["state"] == 2]
        assert {call["device"] for call in ready} == set(ALL)
        assert all(field.items() <= call.items() for call in ready)


def test_unset_gid_index_is_rejected():
    cause = "gid_index must be of a GID that is set on fake0 port 1, got 9"
    with config.override(rdma_gid_index=9), pytest.raises(TransferError, match=cause), engines():
        pass


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("count", [2, 100, 9000])
def test_scattered_blocks(direction, count):
    places = np.random.default_rng(count).permutation(count)
    with engines(count * 300) as pair:
        pair.move(direction, [(300 * i, 300 * int(p) + 7, 257) for i, p in enumerate(places)])


@settings(max_examples=30)
@given(st.data())
def test_any_ranges(data):
    size = 1 << 12
    sides = st.lists(st.sampled_from(ALL), min_size=1, max_size=4, unique=True)
    with engines(size, near=data.draw(sides), far=data.draw(sides)) as pair:
        for direction in data.draw(st.lists(st.sampled_from(DIRECTIONS), min_size=1, max_size=3)):
            cuts = sorted(data.draw(st.sets(st.integers(0, size), min_size=2, max_size=20)))
            pieces = [(a, b - a) for a, b in itertools.pairwise(cuts)]
            ranges = [(size - a - n, a, n) for a, n in data.draw(st.permutations(pieces))]
            pair.move(direction, ranges)


def test_many_regions_at_both_ends():
    """Each range is of another pair of them; slices are of one pair each."""
    layers, block = 7, 4096
    with (
        TransferEngine(transports=["rdma"], topology=topology_of(ALL[:2])) as near,
        TransferEngine(transports=["rdma"], topology=topology_of(ALL[2:])) as far,
    ):
        here = [addressed(16 * block, i) for i in range(layers)]
        there = [np.zeros(16 * block, np.uint8) for _ in range(layers)]
        here_at = [near.register(memory).address for memory in here]
        there_at = [far.register(memory).address for memory in there]
        with near.open(far.name) as peer:
            rows = [
                (here_at[layer] + block * i, there_at[layer] + block * (15 - i), block)
                for i in range(16)
                for layer in range(layers)
            ]
            near.write(peer, rows).wait()
        for ours, theirs in zip(here, there, strict=True):
            np.testing.assert_array_equal(theirs.reshape(16, -1), ours.reshape(16, -1)[::-1])


@pytest.mark.parametrize(("near", "far"), [(1, 1), (1, 4), (4, 1), (3, 2)])
def test_every_nic_of_either_side_has_a_queue_pair(world, near, far):
    with engines(near=ALL[:near], far=ALL[:far]):
        queue_pairs = world.live()["queue pair"]
        assert queue_pairs == 2 * max(near, far)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_nic_carries_part_of_a_transfer(direction):
    size = 8 << 20
    with engines(size, near=ALL[:3], far=ALL[3:]) as pair:
        pair.move(direction, [(0, 0, size)])
        paths = pair.near.stats()["paths"][pair.far.name]
        moved = {
            name: counters["num_bytes_written" if direction == "write" else "num_bytes_read"]
            for name, counters in paths.items()
        }
        assert sum(moved.values()) == size
        assert set(moved) == {"connection", *ALL[:3]} and moved.pop("connection") == 0
        assert all(moved.values())


def test_explain_path_lists_rails_and_down_ports(world):
    world.set_port(1, state="DOWN")
    with engines(near=ALL[:2], far=ALL[2:]) as pair:
        here, there = pair.near_region, pair.far_region
        found = pair.near.explain_path(here.address, pair.peer, there.address, 100)
        assert (found.transport, found.method) == ("rdma", "nics")
        assert found.writable and found.readable
        told = "\n".join(found.reasons)
        assert "fake0 to fake2, fake1 to fake" in told
        assert "(down: port 1 of fake1 is DOWN)" in told


def test_a_notification_waits_for_the_data(world):
    with engines() as pair:
        with world.held() as let:
            first = pair.write([(0, 0, 100)])
            second = pair.write([(200, 200, 100)], notify=b"there")
            assert pair.far.receive_notifications(0.2) == []
            let(1)
            assert pair.far.receive_notifications(0.2) == []
        [(sender, told)] = pair.far.receive_notifications(10.0)
        assert (sender, told) == (pair.near.name, b"there")
        first.wait()
        second.wait()
        assert (pair.there[200:300] == pair.here[200:300]).all()


def test_bare_notification_and_notification_after_read():
    with engines() as pair:
        pair.near.write(pair.peer, [], notify=b"nothing").wait()
        pair.move("read", [(0, 0, 100)], notify=b"read")
        pair.move("write", [(0, 0, 40 << 10)], notify=b"written")
        told = [told for _, told in pair.far.receive_notifications(10.0)]
        assert told == [b"nothing", b"read", b"written"]


def test_concurrent_requests_stay_separate():
    with engines(1 << 18) as pair:
        expected = pair.there.copy()
        tickets = []
        for i in range(200):
            rows = [(512 * i, 512 * i, 500), (512 * i + 505, 512 * i + 506, 3)]
            for a, b, size in rows:
                expected[b : b + size] = pair.here[a : a + size]
            tickets.append(pair.write(rows))
        for ticket in tickets:
            ticket.wait()
        np.testing.assert_array_equal(pair.there, expected)
