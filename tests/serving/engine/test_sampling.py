"""Sampling draws from the right distribution, and gives the same tokens for the same seed."""

import math
from fractions import Fraction

import pytest
import torch

from mooncake_serving.engine import NotFinite, SamplingParams
from mooncake_serving.engine.sampling import Draw, sample

LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


def draws(count=4000, seed=7, **params):
    wanted = [Draw(SamplingParams(**params), seed, i) for i in range(count)]
    return sample(LOGITS.expand(count, -1), wanted)


def test_greedy_takes_the_most_likely_token():
    assert sample(LOGITS[None], [Draw(SamplingParams(), 0, 0)]) == [1]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_k": 99}, [0.1, 0.4, 0.2, 0.3]),
        ({"top_p": 0.69}, [0, 4 / 7, 0, 3 / 7]),
        ({"top_p": 0.71}, [0, 4 / 9, 2 / 9, 3 / 9]),
        ({"top_p": 1e-9}, [0, 1, 0, 0]),
        ({"temperature": 0.5}, [1 / 30, 16 / 30, 4 / 30, 9 / 30]),
        ({"temperature": 1e-6}, [0, 1, 0, 0]),
        ({"temperature": 1e-46}, [0, 1, 0, 0]),  # 0 in float32
        ({"temperature": 5e-324}, [0, 1, 0, 0]),
        ({"temperature": 10**30}, [0.25, 0.25, 0.25, 0.25]),  # more than torch has integers for
        ({"top_p": Fraction(69, 100)}, [0, 4 / 7, 0, 3 / 7]),
    ],
)
def test_tokens_are_drawn_with_their_probabilities(params, expected):
    got = torch.bincount(torch.tensor(draws(**({"temperature": 1.0} | params))), minlength=4)
    for count, probability in zip(got.tolist(), expected, strict=True):
        deviation = math.sqrt(4000 * probability * (1 - probability))
        assert abs(count - 4000 * probability) <= 4.5 * deviation


def test_draw_depends_only_on_its_seed_and_index():
    assert draws(50, temperature=1.0) == draws(50, temperature=1.0)
    assert draws(50, temperature=1.0) != draws(50, temperature=1.0, seed=8)
    alone = sample(LOGITS[None], [Draw(SamplingParams(temperature=1.0), 7, 33)])
    assert alone[0] == draws(50, temperature=1.0)[33]


def test_each_row_is_sampled_with_its_own_params():
    mixed = [Draw(SamplingParams(), 0, 0), Draw(SamplingParams(temperature=1.0, top_k=1), 0, 0)]
    assert sample(torch.stack([-LOGITS, LOGITS]), mixed) == [0, 1]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nonfinite_logits_are_rejected(bad, temperature, dtype):
    logits = LOGITS.to(dtype).repeat(3, 1)
    logits[1, 2] = bad
    logits[2, 3] = -math.inf  # which is a token that cannot be
    with pytest.raises(NotFinite, match=r"^sample: logits must be finite, .* \[1\]$"):
        sample(logits, [Draw(SamplingParams(temperature=temperature), 0, 0)] * 3)
    with pytest.raises(NotFinite, match=r"\[0\]"):
        sample(torch.full((1, 4), -math.inf), [Draw(SamplingParams(), 0, 0)])


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -1}, r"temperature must be >= 0 and finite, got -1"),
        ({"temperature": math.nan}, "temperature must be >= 0 and finite, got nan"),
        ({"temperature": "1"}, "temperature must be a number, got '1'"),
        ({"max_tokens": 2.5}, "max_tokens must be an integer, got 2.5"),
        ({"stop_token_ids": 5}, "stop_token_ids must be a tuple of token ids, got 5"),
        ({"stop_token_ids": ("x",)}, r"stop_token_ids must be a tuple of .*, got \('x',\)"),
        ({"ignore_eos": "no"}, "ignore_eos must be True or False, got 'no'"),
        ({"temperature": True}, "temperature must be a number, got True"),
        ({"top_k": True}, "top_k must be an integer, got True"),
        ({"seed": "x"}, "seed must be an integer or None, got 'x'"),
        ({"top_k": -3}, "top_k must be >= 0, got -3"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.5}, r"top_p must be in \(0, 1\], got 1.5"),
        ({"temperature": 10**5000}, "temperature must be finite, got a huge int"),
        ({"seed": 1 << 64}, r"seed must be in \[-2\*\*63, 2\*\*64\), got 18446744073709551616"),
        ({"max_tokens": 0}, "max_tokens must be >= 1, got 0"),
    ],
)
def test_bad_parameters_are_rejected(params, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**params)


def test_number_of_draws_must_match_the_rows():
    with pytest.raises(ValueError, match="draws must have 2 entries, got 0"):
        sample(torch.zeros(2, 4), [])
