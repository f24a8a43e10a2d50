"""simhash: bits against float64, their order, and under torch.compile."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels import _library, similarity

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
OPERATOR = torch.ops.mooncake_kernels.pack_signs.default


def tokens_and_planes(num_tokens, dim, bits, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    embeddings = torch.randn(num_tokens, dim, generator=generator).to(dtype)
    return embeddings, torch.randn(dim, bits, generator=generator)


def bits_of(signatures):
    """Bool ``[num_tokens, bits]``."""
    return (signatures.cpu()[:, :, None] >> torch.arange(8) & 1).bool().flatten(1)


def check(embeddings, planes, engine="auto", device="cpu"):
    """Compare each bit with the exact sign, but where float32 may round it away; return where."""
    signatures = mk.simhash(embeddings.to(device), planes.to(device), engine=engine)
    assert signatures.dtype == torch.uint8 and signatures.device.type == device
    assert signatures.shape == (len(embeddings), planes.shape[1] // 8)
    dots = embeddings.double() @ planes.double()
    sizes = embeddings.double().abs() @ planes.double().abs()
    rounding = torch.finfo(torch.float32).eps * max(len(planes), 1)
    is_sure = dots.abs() > rounding * sizes
    assert torch.equal(bits_of(signatures)[is_sure], (dots >= 0)[is_sure])
    return is_sure


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens, dim, bits", [(70, 48, 256), (3, 1, 8), (33, 200, 72)])
def test_bits_are_signs_of_dot_products(engine, dtype, num_tokens, dim, bits):
    embeddings, planes = tokens_and_planes(num_tokens, dim, bits, dtype)
    for normals in (planes, planes.to(dtype)):
        is_sure = check(embeddings, normals, engine.engine, engine.device)
        assert is_sure.double().mean() > 0.99


def test_the_lowest_bit_comes_first(engine):
    planes = -torch.ones(1, 24)
    planes[0, [0, 9, 23]] = 1
    embeddings = torch.tensor([[1.0], [-1.0]]).to(engine.device)
    signatures = mk.simhash(embeddings, planes.to(engine.device), engine=engine.engine)
    assert signatures.tolist() == [[1, 2, 128], [254, 253, 127]]


def test_zero_sets_the_bit_and_nan_does_not(engine):
    embeddings = torch.tensor([[0.0], [-0.0], [torch.nan], [torch.inf], [-torch.inf]])
    planes = torch.ones(1, 8)
    arguments = (embeddings.to(engine.device), planes.to(engine.device))
    assert mk.simhash(*arguments, engine=engine.engine).tolist() == [[255], [255], [0], [255], [0]]


def test_float64_keeps_its_range(engine):
    """Values and dots that float32 rounds to infinity, NaN or zero."""
    planes = torch.tensor([[1.0] * 8, [-0.5] * 8], device=engine.device)
    rows = [[1e39, 1e39], [-1e39, -1e39], [1e-60, 0], [-1e-60, 0], [torch.nan, 1]]
    embeddings = torch.tensor(rows, dtype=torch.float64, device=engine.device)
    signatures = mk.simhash(embeddings, planes, engine=engine.engine)
    assert signatures.tolist() == [[255], [0], [255], [0], [0]]


def test_no_tokens_give_no_signatures(engine):
    embeddings, planes = tokens_and_planes(0, 5, 16)
    check(embeddings, planes, engine.engine, engine.device)


@settings(max_examples=60, deadline=None)
@given(
    *(st.integers(0, 40), st.integers(0, 300), st.integers(1, 40), st.sampled_from(DTYPES)),
    st.integers(0, 9),
)
def test_embeddings_of_any_shape(num_tokens, dim, num_bytes, dtype, seed):
    check(*tokens_and_planes(num_tokens, dim, 8 * num_bytes, dtype, seed))


def test_strided_tokens_and_planes():
    embeddings, planes = tokens_and_planes(40, 30, 32)
    check(embeddings[::3], planes)
    check(embeddings.t()[:, :30], planes)
    check(embeddings[:, ::2], planes.t().contiguous().t()[1::2])


@pytest.mark.parametrize("most", [1, 100, 1000])
def test_rows_are_processed_in_parts(monkeypatch, most):
    embeddings, planes = tokens_and_planes(25, 20, 16, torch.bfloat16)
    whole = mk.simhash(embeddings, planes)
    monkeypatch.setitem(similarity.MOST_FLOATS, "cpu", most)
    check(embeddings, planes)
    parts = mk.simhash(embeddings, planes)
    assert (bits_of(parts) != bits_of(whole)).float().mean() < 0.01


def test_autocast_does_not_round_the_products():
    embeddings, planes = tokens_and_planes(50, 512, 256)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check(embeddings, planes)


def test_similar_embeddings_have_similar_signatures():
    """The share of differing bits is the angle over pi: here for 4096 bits, to five sigma."""
    embeddings, planes = tokens_and_planes(2, 64, 4096)
    for mix in (0.0, 0.1, 1.0, 30.0):
        pair = torch.stack((embeddings[0], embeddings[0] + mix * embeddings[1]))
        angle = torch.arccos(torch.cosine_similarity(pair[0], pair[1], dim=0).clamp(-1, 1)).item()
        first, second = bits_of(mk.simhash(pair, planes))
        assert abs((first != second).double().mean().item() - angle / torch.pi) < 5 * 0.5 / 64


def test_opcheck_and_compile(monkeypatch):
    embeddings, planes = tokens_and_planes(9, 20, 32)
    torch.library.opcheck(OPERATOR, (embeddings @ planes,))
    monkeypatch.setattr(_library, "_logged", set())  # as the first call of all
    compiled = torch.compile(mk.simhash, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(embeddings, planes), mk.simhash(embeddings, planes))


@pytest.mark.parametrize("values", [torch.ones(3), torch.ones(2, 9), torch.ones(2, 8).double()])
def test_operator_checks_its_argument(values):
    with pytest.raises((ValueError, RuntimeError), match="pack_signs: values must be"):
        OPERATOR(values)


@pytest.mark.parametrize(
    "embeddings, planes, message",
    [
        ("tokens", torch.ones(3, 8), "embeddings must be a tensor, got 'tokens'"),
        (torch.ones(2, 3), None, "planes must be a tensor, got None"),
        (torch.ones(3), torch.ones(3, 8), r"embeddings must be .* \[num_tokens, dim\], got"),
        (torch.ones(2, 3).int(), torch.ones(3, 8), "embeddings must be .*, got torch.int32 of"),
        (torch.ones(2, 3), torch.ones(3, 8).long(), "planes must be .*, got torch.int64 of"),
        (torch.ones(2, 3), torch.ones(3), r"planes must be .* \[dim, bits\], got"),
        (torch.ones(2, 3), torch.ones(4, 8), r"planes must be \[3, bits\] on cpu.*got shape"),
        (torch.ones(2, 3), torch.ones(3, 8, device="meta"), "planes must be .* on meta"),
        (torch.ones(2, 3).to_sparse(), torch.ones(3, 8), "embeddings must be a dense tensor, got"),
        (
            torch.nested.as_nested_tensor([torch.ones(3)]),
            torch.ones(3, 8),
            "embeddings must be a dense tensor, got a nested one",
        ),
        (torch.ones(2, 3), torch.ones(3, 8).to_sparse(), "planes must be a dense tensor, got"),
        (torch.ones(2, 3), torch.ones(3, 9), "planes must have a multiple of 8 bits, got 9"),
        (torch.ones(2, 3), torch.ones(3, 0), "planes must have a multiple of 8 bits, got 0"),
        (torch.ones(2, 3).requires_grad_(), torch.ones(3, 8), "embeddings must not require grad"),
    ],
)
@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_bad_arguments_are_rejected(engine, embeddings, planes, message):
    with pytest.raises(mk.InvalidArgument, match=f"^simhash: {message}"):
        mk.simhash(embeddings, planes, engine=engine)


@pytest.mark.parametrize("engine", ["auto", "host", "reference"])
def test_meta_tensors_are_rejected(engine):
    tensors = (tensor.to("meta") for tensor in tokens_and_planes(2, 3, 8))
    with pytest.raises(mk.InvalidArgument, match="^simhash: tensors must be on cpu or cuda, got"):
        mk.simhash(*tensors, engine=engine)


@pytest.mark.parametrize("engine", ["fast", None, "triton"])
def test_bad_engine_is_rejected(engine):
    with pytest.raises(mk.InvalidArgument, match=f"^simhash: engine must be .*, got {engine!r}"):
        mk.simhash(*tokens_and_planes(1, 1, 8), engine=engine)


def test_a_named_engine_does_not_fall_back():
    with pytest.raises((mk.InvalidArgument, mk.Unavailable), match="^simhash: engine cuda"):
        mk.simhash(*tokens_and_planes(1, 1, 8), engine="cuda")
