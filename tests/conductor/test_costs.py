"""Cost models: fits against their source functions, rooflines and NICs against plain sums."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serving.conductor import (
    A800_X8,
    LLAMA2_70B,
    LLAMA3_70B,
    LLAMA_13B,
    Costs,
    InvalidArgument,
    LinearDecode,
    MachineSpec,
    ModelSpec,
    NicTransfer,
    PolynomialPrefill,
    Roofline,
    RooflineDecode,
    RooflinePrefill,
)

LINEAR = LinearDecode(0.02, 0, 0)
LENGTHS = np.array([1, 100, 1000, 8000, 32_000, 131_072])
TOKENS, PREFIX = (a.ravel() for a in np.meshgrid(LENGTHS, [0, 0.25, 0.9]))
PREFIX = (TOKENS * PREFIX).astype(int).clip(0, TOKENS - 1)
coefficient = st.one_of(st.just(0.0), st.floats(1e-3, 1e3))


@given(coefficient, coefficient, coefficient)
@settings(max_examples=60, deadline=None)
def test_prefill_fit_recovers_the_coefficients(base, per_token, per_pair):
    truth = PolynomialPrefill(base * 1e-3, per_token * 1e-6, per_pair * 1e-10)
    seconds = truth.seconds(TOKENS, PREFIX)
    if (seconds <= 0).any():
        return
    fitted = PolynomialPrefill.fit(TOKENS, PREFIX, seconds)
    np.testing.assert_allclose(fitted.seconds(TOKENS, PREFIX), seconds, rtol=1e-6)


def test_noisy_fit_is_nonnegative_and_optimal():
    rng = np.random.default_rng(0)
    truth = PolynomialPrefill(0.02, 0.0, 3e-9)  # the linear term is at its bound
    seconds = truth.seconds(TOKENS, PREFIX) * rng.uniform(0.9, 1.1, len(TOKENS))
    fitted = PolynomialPrefill.fit(TOKENS, PREFIX, seconds)
    best = np.array([fitted.base_s, fitted.per_token_s, fitted.per_pair_s])
    assert (best >= 0).all()

    def error(c):
        return np.sum((PolynomialPrefill(*c).seconds(TOKENS, PREFIX) / seconds - 1) ** 2)

    for factors in itertools.product([0.99, 1, 1.01], repeat=3):
        moved = best * factors + (np.array(factors) > 1) * 1e-9
        assert error(moved) >= error(best) - 1e-12


def test_decode_fit_recovers_the_coefficients():
    truth = LinearDecode(0.02, 1e-4, 3e-8)
    batch, tokens = (a.ravel() for a in np.meshgrid([1, 8, 64], [1000, 100_000, 1_000_000]))
    fitted = LinearDecode.fit(batch, tokens, truth.seconds(batch, tokens))
    assert fitted.base_s == pytest.approx(0.02, rel=1e-6)
    assert fitted.per_request_s == pytest.approx(1e-4, rel=1e-6)
    assert fitted.per_kv_token_s == pytest.approx(3e-8, rel=1e-6)


def test_model_specs_match_published_sizes():
    assert LLAMA3_70B.kv_bytes_per_token == 320 * 1024  # Mooncake, FAST'25, section 2.2
    assert LLAMA3_70B.weight_bytes / 2 == pytest.approx(70.6e9, rel=0.001)
    assert LLAMA2_70B.weight_bytes / 2 == pytest.approx(69.0e9, rel=0.001)
    assert LLAMA_13B.weight_bytes / 2 == pytest.approx(13.0e9, rel=0.002)


def test_roofline_by_hand():
    machine = MachineSpec(1e12, 1e12, 1e12, 1e9)
    line = Roofline(LLAMA_13B, machine, flops_share=0.5, memory_share=0.5, overhead_s=0.25)
    prefill, decode = RooflinePrefill(line), RooflineDecode(line)
    params = 40 * (4 * 5120 * 40 * 128 + 3 * 5120 * 13824)
    pair_flops = 4 * 40 * 40 * 128
    flops = 2 * params * 900 + pair_flops * (1000**2 - 100**2) / 2
    assert float(prefill.seconds(1000, 100)) == pytest.approx(0.25 + flops / 0.5e12)
    assert params == LLAMA_13B.num_layer_params
    num_bytes = 2 * (params + 2 * 32000 * 5120) + 5000 * 2 * 40 * 40 * 128 * 2
    assert float(decode.seconds(1, 5000)) == pytest.approx(0.25 + num_bytes / 0.5e12)
    free = 1e12 - LLAMA_13B.weight_bytes
    assert line.capacity_tokens == int(free // (2 * 40 * 40 * 128 * 2))


def test_roofline_matches_the_paper_on_when_reuse_pays_off():
    """FAST'25, section 2.2: with 8,192 tokens, to load KV beats to compute it from 6 GB/s on."""
    prefill = RooflinePrefill(Roofline(LLAMA3_70B, A800_X8))
    saved_s = float(prefill.seconds(8193, 0) - prefill.seconds(8193, 8192))
    gb_per_s = 8192 * LLAMA3_70B.kv_bytes_per_token / saved_s / 1e9
    assert 4 < gb_per_s < 8


@given(
    own=st.integers(1, 50),
    others=st.lists(st.integers(1, 50), max_size=5),
)
@settings(max_examples=100, deadline=None)
def test_a_transfer_is_never_slower_than_predicted(own, others):
    """Against a fair share simulated in small steps; exact if all others are of a kind."""
    left = np.array([own, *others], float)
    clock = 0.0
    while left[0] > 1e-9:
        active = left > 1e-9
        step = left[active].min() * active.sum()  # bandwidth 1, shared by the active ones
        left[active] -= step / active.sum()
        clock += step
    cost = NicTransfer(bytes_per_token=2, bytes_per_s=2)
    predicted = float(cost.seconds(own, sum(others), len(others)))
    assert predicted >= clock - 1e-6
    if all(n >= own for n in others) or all(n <= own for n in others):
        assert predicted == pytest.approx(clock)


def test_empty_transfer_takes_no_time():
    cost = NicTransfer(bytes_per_token=1, bytes_per_s=10, latency_s=0.5)
    assert cost.seconds([0, 10, 20], 1.0, [3, 0, 3]).tolist() == [0, 1.5, 3.5]


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: PolynomialPrefill.fit([1, 2], [0, 0], [1, 1]), "samples must be at least 3"),
        (
            lambda: PolynomialPrefill.fit([1, 2, 3], 0, [1, 1, -1]),
            "fit: seconds must be positive and finite, got -1.0 at 2",
        ),
        (
            lambda: LinearDecode.fit([1, 2, 3], 0, [1, np.inf, 1]),
            "LinearDecode.fit: seconds must be positive and finite, got inf at 1",
        ),
        (
            lambda: PolynomialPrefill.fit([1, 2, 3], 0, [1, 1]),
            r"seconds must be 3, one a sample, got shape \(2,\)",
        ),
        (
            lambda: PolynomialPrefill.fit([1, 2, np.nan], 0, [1, 1, 1]),
            r"samples must be finite, got \[ *1. +nan +nan\] at 2",
        ),
        (
            lambda: PolynomialPrefill.fit([1000] * 3, [0] * 3, [1.0] * 3),
            "fit: samples must tell 3 coefficients apart, got 3 that tell 1",
        ),
        (
            lambda: PolynomialPrefill.fit([1000, 2000] * 2, 0, 1.0 * np.arange(1, 5)),
            "fit: samples must tell 3 coefficients apart, got 4 that tell 2",
        ),
        (
            lambda: PolynomialPrefill.fit([100, 200, 300], [0, 200, 0], [1, 1, 1]),
            "prefix_tokens must be at least 0, and fewer than num_tokens, got 200 of 200 at 1",
        ),
        (
            lambda: PolynomialPrefill.fit([-100, 200, 300], 0, [1, 1, 1]),
            "and fewer than num_tokens, got 0 of -100 at 0",
        ),
        (
            lambda: PolynomialPrefill.fit([100, 200, 300], [0, 0, -1], [1, 1, 1]),
            "and fewer than num_tokens, got -1 of 300 at 2",
        ),
        (
            lambda: LinearDecode.fit([1, 1, 1], [100, 200, 300], [1, 1, 1]),
            "LinearDecode.fit: samples must tell 3 coefficients apart, got 3 that tell 2",
        ),
        (
            lambda: LinearDecode.fit([1, 2, 3], [512, 1024, 1536], [1, 1, 1]),
            "LinearDecode.fit: samples must tell 3 coefficients apart, got 3 that tell 2",
        ),
        (
            lambda: LinearDecode.fit([1, 0, 3], [5, 1, 1], [1, 1, 1]),
            "batch_size must be at least 1, and kv_tokens at least 0, got 0 and 1 at 1",
        ),
        (lambda: PolynomialPrefill(-1, 0, 0), "Prefill: base_s must be at least 0, got -1"),
        (lambda: PolynomialPrefill(0, "x", 0), "per_token_s must be at least 0, got 'x'"),
        (lambda: PolynomialPrefill(0, 0, np.inf), "per_pair_s must be at least 0, got inf"),
        (lambda: LinearDecode(np.nan, 0, 0), "LinearDecode: base_s must be at least 0, got nan"),
        (lambda: LinearDecode(0, -1, 0), "LinearDecode: per_request_s must be at least 0, got -1"),
        (lambda: LinearDecode(0, 0, -1), "per_kv_token_s must be at least 0, got -1"),
        (
            lambda: ModelSpec(0, 8, 8, 8, 8, 8, 8),
            "ModelSpec: num_layers must be at least 1, got 0",
        ),
        (
            lambda: ModelSpec(8, 8, 8, 8, 8, 8, 0.5),
            "ModelSpec: vocab_size must be an integer, got 0.5",
        ),
        (
            lambda: ModelSpec(8, 8, 8, 8, 8, 8, 8, bytes_per_kv=0),
            "ModelSpec: bytes_per_kv must be positive, got 0",
        ),
        (
            lambda: PolynomialPrefill.fit([1, 2, 3], [0, 0], [1, 2, 3]),
            "PolynomialPrefill.fit: num_tokens and prefix_tokens must be numbers, equally many",
        ),
        (
            lambda: LinearDecode.fit([1, 2, 3], [1, 2], [1, 2, 3]),
            "LinearDecode.fit: batch_size and kv_tokens must be numbers, equally many",
        ),
        (lambda: LinearDecode.fit(1, 2, [1]), "batch_size and kv_tokens must be of one dimension"),
        (lambda: LinearDecode.fit([1], [2], ["x"]), "LinearDecode.fit: seconds must be numbers"),
        (lambda: MachineSpec(0, 0, 0, 0), "MachineSpec: flops must be positive, got 0"),
        (lambda: MachineSpec(1, 1, 1, "x"), "nic_bytes_per_s must be positive, got 'x'"),
        (lambda: NicTransfer(1, 0), "NicTransfer: bytes_per_s must be positive, got 0"),
        (lambda: Roofline(LLAMA_13B, A800_X8, memory_share="1"), r"memory_share must be .*got '1'"),
        (lambda: Roofline(LLAMA_13B, A800_X8, flops_share=1.5), r"flops_share must be in \(0, 1\]"),
        (
            lambda: Roofline(LLAMA3_70B, MachineSpec(1, 1, 80e9, 1)),
            "model must fit 80 GB of memory, got 141 GB of weights",
        ),
        (lambda: Costs(1, 2, 3), "Costs: prefill must be a PrefillCost, got 1"),
        (lambda: Costs(LINEAR, 2, 3), "Costs: decode must be a DecodeCost, got 2"),
        (lambda: Costs(LINEAR, LINEAR, 3), "Costs: transfer must be a TransferCost, got 3"),
        (
            lambda: Costs(LINEAR, LINEAR, NicTransfer(1, 1), 4),
            "Costs: occupancy must be a PrefillCost or None, got 4",
        ),
    ],
)
def test_bad_arguments_are_rejected(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()
