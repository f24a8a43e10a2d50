"""Which rows go through which layer."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncake_serving.semantic import Recompute, deviations, rows_by_layer


def listed(deviation, matched, num_layers, **numbers):
    rows = rows_by_layer(
        torch.tensor(deviation), torch.tensor(matched), num_layers, Recompute(**numbers)
    )
    return [layer.tolist() for layer in rows]


def test_shares_decay_from_the_first_layer_that_drops_rows():
    recompute = Recompute(share=0.4, decay=0.5, floor=0.15, full_layers=2)
    shares = [recompute.share_of(layer) for layer in range(6)]
    assert shares == [1, 1, 0.4, 0.2, 0.15, 0.15]
    assert Recompute(share=0.05, floor=0.1).share_of(1) == 0.05, "no floor above the share"
    assert Recompute(share=0, floor=0.1).share_of(1) == 0


def test_deviation_is_the_sum_of_two_norms():
    generator = torch.Generator().manual_seed(0)
    k, v, old_k, old_v = torch.randn(4, 5, 2, 3, generator=generator)
    got = deviations(k, v, old_k, old_v)
    for t in range(5):
        norms = [
            math.sqrt(sum((a - b) ** 2 for a, b in zip(new, old, strict=True)))
            for new, old in (
                (k[t].flatten().tolist(), old_k[t].flatten().tolist()),
                (v[t].flatten().tolist(), old_v[t].flatten().tolist()),
            )
        ]
        assert got[t] == pytest.approx(sum(norms), rel=1e-6)


def test_rows_with_the_largest_deviation_are_kept():
    deviation = [0.1, 0.9, 0.5, 0.3, 0.7, 0.0]
    matched = [True] * 6
    rows = listed(deviation, matched, 4, share=0.6, decay=0.5, floor=0)
    # of five (the last always goes on): 3, then ceil(1.5) = 2
    assert rows == [[0, 1, 2, 3, 4, 5], [1, 2, 4, 5], [1, 4, 5], [1, 5]]


def test_unmatched_and_last_rows_are_always_kept():
    matched = [True, False, True, True, False, True]
    rows = listed([9.0, 0.0, 9.0, 1.0, 0.0, 0.0], matched, 3, share=0, last_tokens=2)
    assert rows == [[0, 1, 2, 3, 4, 5], [1, 4, 5], [1, 4, 5]]
    assert listed([0.0, 0.0], [True, True], 2, share=0, last_tokens=9)[1] == [0, 1]


def test_ties_keep_the_earlier_row_and_nan_comes_first():
    rows = listed([1.0, 2.0, 2.0, math.nan, 2.0, 0.0], [True] * 6, 2, share=0.5)
    assert rows[1] == [1, 2, 3, 5]


@given(
    values=st.lists(st.tuples(st.floats(0, 10, width=32), st.booleans()), min_size=1, max_size=30),
    num_layers=st.integers(1, 8),
    share=st.floats(0, 1),
    decay=st.floats(0, 1),
    floor=st.floats(0, 1),
    full_layers=st.integers(1, 4),
    last_tokens=st.integers(1, 4),
)
def test_rows_of_each_layer_are_a_subset_of_the_previous(
    values, num_layers, share, decay, floor, full_layers, last_tokens
):
    recompute = Recompute(
        share=share,
        decay=decay,
        floor=floor,
        full_layers=full_layers,
        last_tokens=last_tokens,
    )
    deviation, matched = (torch.tensor(column) for column in zip(*values, strict=True))
    rows = [set(r.tolist()) for r in rows_by_layer(deviation, matched, num_layers, recompute)]
    always = {i for i, is_matched in enumerate(matched.tolist()) if not is_matched}
    always |= set(range(len(values) - last_tokens, len(values))) & set(range(len(values)))
    others = set(range(len(values))) - always
    before = set(range(len(values)))
    for layer, chosen in enumerate(rows):
        assert always <= chosen <= before
        assert len(chosen - always) == math.ceil(recompute.share_of(layer) * len(others))
        left = [float(deviation[i]) for i in others - chosen]
        assert all(float(deviation[i]) >= max(left, default=0) for i in chosen - always)
        before = chosen
    assert all(len(chosen) == len(values) for chosen in rows[:full_layers])


@pytest.mark.parametrize(
    ("deviation", "is_matched", "message"),
    [
        ("x", torch.ones(4, dtype=torch.bool), r"deviation must be \[num_rows\], got 'x'"),
        (torch.ones(2, 2), torch.ones(4, dtype=torch.bool), r"deviation must be \[num_rows\], got"),
        (torch.ones(4), torch.ones(5, dtype=torch.bool), r"is_matched must be bool \[4\], got"),
        (torch.ones(4), torch.ones(4), r"is_matched must be bool \[4\], got"),
        (torch.ones(4), [True] * 4, r"is_matched must be bool \[4\], got"),
    ],
)
def test_rows_by_layer_rejects_bad_tensors(deviation, is_matched, message):
    with pytest.raises(ValueError, match=f"rows_by_layer: {message}"):
        rows_by_layer(deviation, is_matched, 3, Recompute())


def test_rows_by_layer_rejects_bad_options():
    matched = torch.ones(4, dtype=torch.bool)
    with pytest.raises(ValueError, match="rows_by_layer: num_layers must be at least 0, got -1"):
        rows_by_layer(torch.ones(4), matched, -1, Recompute())
    with pytest.raises(ValueError, match="rows_by_layer: recompute must be a Recompute, got None"):
        rows_by_layer(torch.ones(4), matched, 2, None)


def test_deviations_reject_unequal_shapes():
    """They would be broadcast."""
    right = torch.ones(4, 2, 8)
    for index, name in enumerate(("fresh_k", "fresh_v", "reused_k", "reused_v")):
        arguments = [right] * 4
        arguments[index] = torch.ones(4, 8)
        message = rf"deviations: {name} must be \[num_tokens, num_kv_heads, head_dim\], got"
        with pytest.raises(ValueError, match=message):
            deviations(*arguments)
    with pytest.raises(
        ValueError, match=r"reused_k must be \[4, 2, 8\], as fresh_k, got \[1, 2, 8\]"
    ):
        deviations(right, right, torch.ones(1, 2, 8), right)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"share": 1.1}, r"share must be in \[0, 1\], got 1.1"),
        ({"decay": -0.1}, r"decay must be in \[0, 1\], got -0.1"),
        ({"floor": float("nan")}, r"floor must be in \[0, 1\], got nan"),
        ({"share": True}, "share must be a number, got True"),
        ({"full_layers": 0}, "full_layers must be at least 1, got 0"),
        ({"last_tokens": 1.0}, "last_tokens must be an integer, got 1.0"),
    ],
)
def test_bad_numbers_are_rejected(changes, message):
    with pytest.raises(ValueError, match=f"Recompute: {message}"):
        Recompute(**changes)
