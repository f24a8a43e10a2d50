"""merge_attention: against float64, with parts that have no keys, and under torch.compile."""

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels import _library
from mooncake_kernels.reference import attention as reference

TOLERANCE = {torch.float32: 3e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def parts(n, num_q, heads, dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    outs = torch.randn(n, num_q, heads, dim, generator=generator).to(dtype)
    lses = torch.randn(n, num_q, heads, generator=generator) * 5
    empty = torch.rand(n, num_q, heads, generator=generator) < 0.3
    empty[:, 0] = True
    outs[empty] = torch.nan
    return outs, lses.masked_fill(empty, -torch.inf)


def check(outs, lses, engine="auto", log2=False, device="cpu"):
    out, lse = mk.merge_attention(outs.to(device), lses.to(device), log2=log2, engine=engine)
    expected, expected_lse = reference.merge_attention(outs, lses, log2)
    assert out.dtype == outs.dtype and lse.dtype == torch.float32
    rtol = TOLERANCE[outs.dtype]
    torch.testing.assert_close(out.double().cpu(), expected, rtol=4 * rtol, atol=4 * rtol)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("n, dim", [(1, 64), (3, 128), (2, 5)])
@pytest.mark.parametrize("log2", [False, True])
def test_merge_matches_float64(backend, dtype, n, dim, log2):
    check(*parts(n, 3, 2, dim, dtype), backend.engine, log2, backend.device)


def test_single_part_is_returned_unchanged(backend):
    outs, lses = parts(1, 4, 2, 16)
    outs, lses = outs.nan_to_num(), lses.nan_to_num(neginf=0.5)
    arguments = (outs.to(backend.device), lses.to(backend.device))
    out, lse = mk.merge_attention(*arguments, engine=backend.engine)
    torch.testing.assert_close(out.cpu(), outs[0], rtol=1e-6, atol=0)
    torch.testing.assert_close(lse.cpu(), lses[0], rtol=1e-6, atol=1e-6)


def test_large_lse_does_not_overflow(backend):
    outs = torch.ones(2, 1, 1, 4)
    lses = torch.tensor([[[1e4]], [[1e4 - math.log(3)]]])
    arguments = (outs.to(backend.device), lses.to(backend.device))
    out, lse = mk.merge_attention(*arguments, engine=backend.engine)
    torch.testing.assert_close(out.cpu(), torch.ones(1, 1, 4), rtol=1e-6, atol=0)
    assert abs(lse.item() - (1e4 + math.log(4 / 3))) < 2e-3


@pytest.mark.parametrize("log2", [False, True])
@pytest.mark.parametrize("size", [1e2, 1e3, 1e4])
def test_large_lse_loses_no_precision(backend, size, log2):
    """Weights are of differences: they add up to 1, whatever the rounding of the merged lse."""
    lses = torch.rand(3, 64, 4, generator=torch.Generator().manual_seed(0)) * 2 + size
    arguments = (torch.ones(3, 64, 4, 32).to(backend.device), lses.to(backend.device))
    out, _ = mk.merge_attention(*arguments, log2=log2, engine=backend.engine)
    torch.testing.assert_close(out.cpu(), torch.ones(64, 4, 32), rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("lses", [(torch.inf, 0), (0, torch.inf), (torch.inf, torch.nan)])
def test_infinite_and_nan_lse_match_the_reference(backend, lses):
    outs, lses = torch.ones(2, 1, 1, 4), torch.tensor(lses).view(2, 1, 1)
    arguments = (outs.to(backend.device), lses.to(backend.device))
    out, lse = mk.merge_attention(*arguments, engine=backend.engine)
    expected, expected_lse = reference.merge_attention(outs, lses, False)
    torch.testing.assert_close(out.double().cpu(), expected, equal_nan=True)
    torch.testing.assert_close(lse.double().cpu(), expected_lse, equal_nan=True)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 3), st.integers(1, 300), st.booleans())
def test_merges_parts_of_any_shape(n, num_q, heads, dim, log2):
    if num_q == 0:
        out, lse = mk.merge_attention(torch.empty(n, 0, heads, dim), torch.empty(n, 0, heads))
        assert out.shape == (0, heads, dim) and lse.shape == (0, heads)
    else:
        check(*parts(n, num_q, heads, dim, seed=n + dim), log2=log2)


def test_strided_parts():
    outs, lses = parts(4, 3, 2, 8)
    check(outs[::2], lses[::2])
    check(outs.transpose(1, 2), lses.transpose(1, 2))


def test_opcheck_and_compile():
    operator = torch.ops.mooncake_kernels.merge_attention.default
    torch.library.opcheck(operator, (*parts(2, 3, 2, 8), False))
    _library._logged.clear()  # a choice that was not logged yet must not break the graph
    compiled = torch.compile(mk.merge_attention, backend="aot_eager", fullgraph=True)
    outs, lses = parts(2, 3, 2, 8)
    for ours, other in zip(compiled(outs, lses), mk.merge_attention(outs, lses), strict=True):
        assert torch.equal(ours, other)


def test_auto_logs_its_choice_once(caplog):
    _library._logged.clear()
    with caplog.at_level(logging.INFO, logger="mooncake_kernels"):
        for _ in range(2):
            mk.merge_attention(*parts(2, 3, 2, 8))
            mk.merge_attention(*parts(2, 3, 2, 8), engine="host")
    assert caplog.messages == ["engine auto: host for merge_attention on cpu"]


@pytest.mark.parametrize(
    "outs, lses, message",
    [
        (torch.ones(2, 3, 4), torch.ones(2, 3), r"outs must be .* n >= 1, got torch.float32 of"),
        (torch.ones(0, 1, 1, 4), torch.ones(0, 1, 1), "n >= 1, got"),
        (torch.ones(2, 1, 1, 4).int(), torch.ones(2, 1, 1), "got torch.int32"),
        (torch.ones(2, 1, 1, 4), torch.ones(2, 1), r"lses must be float32 \[2, 1, 1\]"),
        (torch.ones(2, 1, 1, 4), torch.ones(2, 1, 1).double(), "got torch.float64"),
        (
            torch.ones(2, 1, 1, 4).requires_grad_(),
            torch.ones(2, 1, 1),
            "outs must not require grad",
        ),
        (
            torch.ones(2, 1, 1, 4, device="meta"),
            torch.ones(2, 1, 1, device="meta"),
            "outs must be on cpu or cuda, got meta",
        ),
        ("outs", torch.ones(1), "outs must be a tensor, got 'outs'"),
    ],
)
def test_bad_arguments_are_rejected(outs, lses, message):
    with pytest.raises(mk.InvalidArgument, match=f"^merge_attention: .*{message}"):
        mk.merge_attention(outs, lses)
