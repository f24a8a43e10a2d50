"""What SDPA receives: the same attention as with the dense mask, in the cheapest form."""

import pytest
import torch
from torch.nn.attention.bias import CausalBias
from torch.nn.functional import scaled_dot_product_attention

import mooncake_kernels as mk
from tests.mask.examples import EXAMPLES, attention


@pytest.mark.parametrize("name", EXAMPLES)
def test_sdpa_attends_only_to_visible_keys(name: str) -> None:
    rows = EXAMPLES[name]
    torch.manual_seed(0)
    for mask, seen in zip(rows.to_sdpa(), rows.dense(), strict=True):
        if not len(seen):
            continue
        q, k, v = (
            torch.randn(length, 8, dtype=torch.float64) for length in (*seen.shape, seen.shape[1])
        )
        heads = (tensor[None, None] for tensor in (q, k, v))
        out = scaled_dot_product_attention(*heads, **mask._asdict())
        torch.testing.assert_close(out[0, 0], attention(q, k, v, seen))


def kinds(name: str) -> list[str]:
    return [
        "flag" if mask.is_causal else type(mask.attn_mask).__name__
        for mask in EXAMPLES[name].to_sdpa()
    ]


def test_the_cheapest_form_is_chosen() -> None:
    # One query that sees all, extends, no query, a whole prompt, an extend.
    assert kinds("causal") == ["NoneType", "CausalBias", "NoneType", "flag", "CausalBias"]
    assert kinds("full") == ["NoneType"] * 5
    assert kinds("window")[1:] == ["Tensor", "NoneType", "Tensor", "Tensor"]
    bias = EXAMPLES["causal"].to_sdpa()[1].attn_mask
    assert isinstance(bias, CausalBias) and (bias.seq_len_q, bias.seq_len_kv) == (5, 20)


def test_queries_that_see_no_keys_give_zero() -> None:
    seen = torch.tensor([[False, False], [True, False]])
    [mask] = mk.mask.rows_from_dense([seen]).to_sdpa()
    q, v = torch.randn(2, 1, 1, 2, 8)
    out = scaled_dot_product_attention(q, q, v, **mask._asdict())
    assert torch.equal(out[0, 0], torch.stack([torch.zeros(8), v[0, 0, 0]]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", EXAMPLES)
def test_bias_is_zero_or_minus_infinity(name: str, dtype: torch.dtype) -> None:
    rows = EXAMPLES[name]
    for bias, seen in zip(rows.to_bias(dtype), rows.dense(), strict=True):
        assert bias.dtype == dtype
        assert torch.equal(bias == 0, seen) and torch.equal(bias == -torch.inf, ~seen)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, "float32"])
def test_bias_rejects_dtypes_without_infinity(dtype: object) -> None:
    with pytest.raises(mk.InvalidArgument, match="to_bias: dtype must be one of"):
        EXAMPLES["full"].to_bias(dtype)
