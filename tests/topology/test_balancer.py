"""The balancer: the NIC that is done first, of the first live tier; on many threads."""

from collections import Counter
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kernels import _host
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.topology import NicPolicy

from ..threads import in_threads
from .support import machine

MIB = 1 << 20


def test_gpu_and_its_location_pick_the_same_nic():
    topology = machine("hgx-a100-8nic")
    balancer = topology.balancer()
    assert str(balancer.pick(topology.gpus[1], MIB)) == "mlx5_1"
    assert balancer.in_flight(topology.nics[1]) == MIB


def test_equal_nics_share_by_load():
    balancer = machine("hgx-a100-8nic").balancer()
    assert [str(balancer.pick("cuda:1", MIB)) for _ in range(4)] == ["mlx5_1", "mlx5_0"] * 2
    assert balancer.in_flight("mlx5_0") == balancer.in_flight("mlx5_1") == 2 * MIB
    balancer.done("mlx5_0", MIB)
    assert str(balancer.pick("cuda:1", MIB)) == "mlx5_0"


def test_load_is_shared_across_locations():
    balancer = machine("hgx-a100-8nic").balancer()
    assert str(balancer.pick("cuda:0", MIB)) == "mlx5_0"
    assert [str(balancer.pick(gpu, MIB)) for gpu in ("cuda:1", "cuda:0")] == ["mlx5_1", "mlx5_0"]
    assert str(balancer.pick("cuda:0", MIB)) == "mlx5_1"


def test_next_tier_is_used_when_no_nic_is_alive():
    balancer = machine("down-port").balancer()
    assert str(balancer.pick("cuda:0", MIB)) == "mlx5_0"
    balancer.set_alive("mlx5_0", False)
    assert {str(balancer.pick("cuda:0", MIB)) for _ in range(2)} == {"mlx5_2", "mlx5_3"}
    for nic in machine("down-port").nics:
        balancer.set_alive(nic, False)
    assert balancer.pick("cuda:0", MIB) is None
    balancer.set_alive("mlx5_3", True)
    assert str(balancer.pick("cuda:0", MIB)) == "mlx5_3"


def test_a_limit_counts_over_tiers():
    balancer = machine("down-port").balancer(NicPolicy(limit=1))
    balancer.set_alive("mlx5_0", False)
    assert balancer.pick("cuda:0", MIB) is None
    assert machine("no-nic").balancer().pick("cuda:0", MIB) is None


def test_a_faster_nic_gets_more():
    native = _host.NicBalancer([50.0, 25.0], [[[0, 1]]])
    assert Counter(native.pick(0, MIB) for _ in range(300)) == {0: 200, 1: 100}


@given(
    speeds=st.lists(st.floats(0.1, 100), min_size=1, max_size=6),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1 << 40), st.booleans())),
    data=st.data(),
)
def test_picks_match_the_documented_algorithm(speeds, steps, data):
    order = data.draw(st.permutations(range(len(speeds))))
    cut = data.draw(st.integers(0, len(speeds)))
    tiers = [order[:cut], order[cut:]]
    native = _host.NicBalancer(speeds, [tiers])
    in_flight, alive, picked = [0] * len(speeds), [True] * len(speeds), []
    for which, num_bytes, take_back in steps:
        if take_back and picked:
            nic, taken = picked.pop(which % len(picked))
            native.done(nic, taken)
            in_flight[nic] -= taken
            continue
        alive[which % len(speeds)] = num_bytes % 3 > 0
        native.set_alive(which % len(speeds), num_bytes % 3 > 0)
        live = next((t for t in ([n for n in tier if alive[n]] for tier in tiers) if t), [])
        best = min(live, key=lambda n: (in_flight[n] + num_bytes) * (1 / speeds[n]), default=-1)
        assert native.pick(0, num_bytes) == best
        if best >= 0:
            in_flight[best] += num_bytes
            picked.append((best, num_bytes))
    assert [native.in_flight(nic) for nic in range(len(speeds))] == in_flight


def test_concurrent_picks_keep_the_load_exact():
    balancer = machine("hgx-a100-8nic").balancer()
    left = []

    def work(gpu):
        held = [(balancer.pick(gpu, size), size) for size in range(1, 2000)]
        for nic, size in held[::2]:
            balancer.done(nic, size)
        left.extend(held[1::2])

    in_threads(*(partial(work, f"cuda:{i}") for i in range(4)))
    total = Counter()
    for nic, size in left:
        total[nic.name] += size
    nics = machine("hgx-a100-8nic").nics
    assert {nic.name: balancer.in_flight(nic) for nic in nics} == {
        nic.name: total[nic.name] for nic in nics
    }
    for nic, size in left:
        balancer.done(nic, size)
    assert sum(balancer.in_flight(nic) for nic in nics) == 0


def test_bad_arguments_are_rejected():
    balancer = machine("down-port").balancer()
    with pytest.raises(InvalidArgument, match="pick: location must be one of .* got 'cuda:9'"):
        balancer.pick("cuda:9", 1)
    with pytest.raises(InvalidArgument, match=r"done: nic must be one of .*mlx5_0.* got 'mlx5_9'"):
        balancer.done("mlx5_9", 1)
    with pytest.raises(InvalidArgument, match="done: num_bytes must be in flight .* got 8 of 0"):
        balancer.done("mlx5_0", 8)
    with pytest.raises(InvalidArgument, match=r"gb_per_s\[1\] must be a number > 0, got 0"):
        _host.NicBalancer([1.0, 0.0], [])
    with pytest.raises(InvalidArgument, match=r"nic must be in \[0, 1\), got 1"):
        _host.NicBalancer([1.0], [[[1]]])
    with pytest.raises(InvalidArgument, match=r"pick: location must be in \[0, 1\), got 1"):
        _host.NicBalancer([1.0], [[[0]]]).pick(1, 1)
