"""spread: in every round, the NIC that most GPUs take is taken by as few as possible."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.topology.spread import spread


def first_choices(tiers):
    return [ordered[0][0] for ordered in spread([[tier] for tier in tiers])]


@pytest.mark.parametrize(
    ("num_gpus", "num_nics", "most"), [(8, 4, 2), (8, 8, 1), (4, 8, 1), (8, 3, 3), (1, 5, 1)]
)
def test_gpus_with_the_same_nics_share_them_evenly(num_gpus, num_nics, most):
    nics = [f"mlx5_{i}" for i in range(num_nics)]
    counts = Counter(first_choices([nics] * num_gpus))
    assert max(counts.values()) == most
    assert len(counts) == min(num_gpus, num_nics)


def test_gpus_with_a_choice_leave_single_nics_to_others():
    """The first GPU could take a, the only NIC that the second one has."""
    assert first_choices([["a", "b"], ["a"]]) == ["b", "a"]
    counts = Counter(first_choices([["a", "b"], ["b", "c"], ["a"], ["c"]]))
    assert max(counts.values()) == 2 and counts["b"] >= 1


TIERS = st.lists(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True), min_size=1, max_size=5
)


@given(TIERS)
@settings(deadline=None)
def test_no_other_assignment_is_more_even(tiers):
    chosen = first_choices(tiers)
    assert all(nic in tier for nic, tier in zip(chosen, tiers, strict=True))
    best = min(max(Counter(choice).values()) for choice in product(*tiers))
    assert max(Counter(chosen).values()) == best


@given(st.lists(TIERS, min_size=1, max_size=4))
def test_spread_keeps_every_nic_and_is_deterministic(tiers_of):
    ordered = spread(tiers_of)
    assert [[sorted(tier) for tier in gpu] for gpu in ordered] == [
        [sorted(tier) for tier in gpu] for gpu in tiers_of
    ]
    assert spread(tiers_of) == ordered


def test_spread_without_gpus():
    assert spread([]) == []
    assert spread([[], [["a"]]]) == [[], [["a"]]]
