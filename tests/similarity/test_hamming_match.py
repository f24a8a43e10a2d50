"""hamming_match: against the loop, ties and limits by hand, and under torch.compile."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels import _library

OPERATOR = torch.ops.mooncake_kernels.hamming_match.default


def signatures(num_tokens, num_bytes, seed=0, levels=256):
    """Random bytes; of few levels many are equal, and so are distances."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, num_bytes)
    return torch.randint(levels, shape, generator=generator, dtype=torch.int64).to(torch.uint8)


def check(queries, references, engine="auto", device="cpu", **limits):
    expected = mk.hamming_match(queries, references, engine="reference", **limits)
    results = mk.hamming_match(queries.to(device), references.to(device), engine=engine, **limits)
    for result, want, dtype in zip(results, expected, (torch.int64, torch.int32), strict=True):
        assert result.dtype == dtype and result.device.type == device
        assert torch.equal(result.cpu(), want)


def matches(engine, queries, references, **limits):
    """What matches tokens of one byte."""
    sides = (
        torch.tensor(side, dtype=torch.uint8, device=engine.device).reshape(-1, 1)
        for side in (queries, references)
    )
    index, distance = mk.hamming_match(*sides, engine=engine.engine, **limits)
    return index.tolist(), distance.tolist()


def test_small_cases_by_hand(engine):
    queries, references = [0b0000, 0b1111, 0b1010], [0b1110, 0b0001, 0b1010, 0b0000]
    assert matches(engine, queries, references) == ([3, 0, 2], [0, 1, 0])
    assert matches(engine, queries, references, window=0) == ([0, 1, 2], [3, 3, 0])
    assert matches(engine, queries, references, window=1) == ([1, 0, 2], [1, 1, 0])
    assert matches(engine, queries, references, max_distance=0) == ([3, -1, 2], [0, -1, 0])


def test_ties_go_to_the_nearest_then_to_the_earlier(engine):
    assert matches(engine, [7] * 4, [7] * 4) == ([0, 1, 2, 3], [0] * 4)
    # Query 2 is as near to reference 1 as to reference 3.
    assert matches(engine, [7] * 5, [0, 6, 0, 5, 0])[0] == [1, 1, 1, 3, 3]
    assert matches(engine, [7] * 5, [6, 0, 0, 0, 6])[0] == [0, 0, 0, 4, 4]


def test_no_reference_within_the_limits_gives_minus_one(engine):
    nothing = ([-1, -1], [-1, -1])
    assert matches(engine, [1, 2], []) == nothing
    assert matches(engine, [1, 2], [0, 0], max_distance=0) == nothing
    assert matches(engine, [1, 2, 3, 4], [9], window=1)[0] == [0, 0, -1, -1]
    assert matches(engine, [], [1, 2]) == ([], [])


@pytest.mark.parametrize("num_bytes", [1, 7, 8, 16, 32, 33, 64, 72, 600])
@pytest.mark.parametrize("levels", [1, 2, 256])
def test_signatures_of_any_length(engine, num_bytes, levels):
    sides = signatures(150, num_bytes, 1, levels), signatures(170, num_bytes, 2, levels)
    check(*sides, engine.engine, engine.device)
    check(*sides, engine.engine, engine.device, window=11, max_distance=3 * num_bytes)


def test_more_references_than_a_chunk_and_more_queries_than_a_block(engine):
    queries, references = signatures(3, 32), signatures(5000, 32, 3)
    references[4567] = queries[1]
    check(queries, references, engine.engine, engine.device)
    check(references[:1500], queries, engine.engine, engine.device, window=1200)
    check(signatures(700, 8), signatures(700, 8, 4), engine.engine, engine.device, window=260)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_cases_match_the_loop(data):
    num_bytes = data.draw(st.integers(1, 70) | st.sampled_from([8, 16, 32, 64]))
    sizes = [data.draw(st.integers(0, 60)) for _ in range(2)]
    levels = data.draw(st.sampled_from([1, 2, 3, 256]))
    seed = data.draw(st.integers(0, 1 << 20))
    limits = {
        "max_distance": data.draw(st.none() | st.integers(0, 8 * num_bytes + 1)),
        "window": data.draw(st.none() | st.integers(0, 70)),
    }
    sides = (signatures(size, num_bytes, seed + i, levels) for i, size in enumerate(sizes))
    check(*sides, **limits)


def test_distant_planted_matches_are_found():
    """2,000 tokens in another order, each with up to 20 of its 256 bits changed."""
    references = signatures(2000, 32)
    order = torch.randperm(2000, generator=torch.Generator().manual_seed(5))
    flips = torch.nn.functional.one_hot(signatures(2000, 20, 6).long(), 256).sum(1) % 2
    flips = (flips.reshape(2000, 32, 8) << torch.arange(8)).sum(2).to(torch.uint8)
    index, distance = mk.hamming_match(references[order] ^ flips, references)
    assert torch.equal(index, order)
    expected = [sum(byte.bit_count() for byte in row) for row in flips.tolist()]
    assert distance.tolist() == expected


def test_result_is_independent_of_the_thread_count():
    sides = signatures(3000, 32), signatures(4000, 32, 1)
    expected = mk.hamming_match(*sides)
    torch.set_num_threads(1)
    try:
        results = mk.hamming_match(*sides)
    finally:
        torch.set_num_threads(2)
    for result, want in zip(results, expected, strict=True):
        assert torch.equal(result, want)


def test_strided_and_unaligned_signatures():
    whole = signatures(61, 64)
    check(whole[::2, :32], whole[1::3, 32:])
    check(whole.t()[:60].contiguous().t(), whole[:, 4:])
    memory = signatures(1, 32 * 50 + 3)[0]
    check(memory[3:].view(50, 32), memory[1 : 1 + 32 * 40].view(40, 32))


def test_limits_beyond_all_bits_and_tokens():
    sides = signatures(20, 8), signatures(30, 8, 1)
    expected = mk.hamming_match(*sides)
    for limit in (1 << 30, np.int64(1 << 40), (1 << 63) - 1):
        results = mk.hamming_match(*sides, max_distance=limit, window=limit)
        assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


def test_opcheck_and_compile(monkeypatch):
    sides = signatures(9, 16), signatures(11, 16, 1)
    torch.library.opcheck(OPERATOR, (*sides, None, None))
    torch.library.opcheck(OPERATOR, (*sides, 50, 3))
    monkeypatch.setattr(_library, "_logged", set())  # as the first call of all
    compiled = torch.compile(mk.hamming_match, backend="aot_eager", fullgraph=True)
    for limits in ({}, {"window": 3, "max_distance": 50}):
        for ours, other in zip(
            compiled(*sides, **limits), mk.hamming_match(*sides, **limits), strict=True
        ):
            assert torch.equal(ours, other)


ONE = torch.ones(2, 8, dtype=torch.uint8)


@pytest.mark.parametrize(
    "queries, references, message",
    [
        ([[1]], ONE, r"query_sig must be a tensor, got \[\[1\]\]"),
        (ONE.int(), ONE, "query_sig must be uint8 .*, got torch.int32 of shape"),
        (ONE, ONE.bool(), "reference_sig must be uint8 .*, got torch.bool of shape"),
        (ONE[0], ONE, r"query_sig must be uint8 \[num_tokens, num_bytes\], got"),
        (ONE[:, :0], ONE[:, :0], "query_sig must have 1 to 1048575 bytes a token, got 0"),
        (ONE, ONE[:, :7], r"reference_sig must be \[num_references, 8\] on cpu"),
        (ONE, ONE.to("meta"), "reference_sig must be .* on meta"),
        (ONE.to("meta"), ONE.to("meta"), "tensors must be on cpu or cuda, got meta"),
        (ONE.to_sparse(), ONE, "query_sig must be a dense tensor, got a torch.sparse_coo one"),
        (
            torch.ones(1, 1 << 20, dtype=torch.uint8),
            torch.ones(1, 1 << 20, dtype=torch.uint8),
            "query_sig must have 1 to 1048575 bytes a token, got 1048576",
        ),
        (  # before anything as large is made of it
            ONE[:, :1],
            ONE[:1, :1].expand((1 << 37) + 1, 1),
            "reference_sig must have at most 137438953472 tokens, got 137438953473",
        ),
    ],
)
@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_bad_signatures_are_rejected(engine, queries, references, message):
    with pytest.raises(mk.InvalidArgument, match=f"^hamming_match: {message}"):
        mk.hamming_match(queries, references, engine=engine)


@pytest.mark.parametrize("argument", ["max_distance", "window"])
@pytest.mark.parametrize("value", [-1, True, 2.0, "3", 1 << 63, torch.tensor(3)])
def test_bad_limits_are_rejected(argument, value):
    with pytest.raises(
        mk.InvalidArgument, match=f"^hamming_match: {argument} must be an integer in 0 to"
    ):
        mk.hamming_match(ONE, ONE, **{argument: value})


@pytest.mark.parametrize("engine", ["fast", None, "triton"])
def test_bad_engine_is_rejected(engine):
    with pytest.raises(mk.InvalidArgument, match=r"^hamming_match: engine must be one of"):
        mk.hamming_match(ONE, ONE, engine=engine)


def test_a_named_engine_does_not_fall_back():
    with pytest.raises((mk.InvalidArgument, mk.Unavailable), match="^hamming_match: engine cuda"):
        mk.hamming_match(ONE, ONE, engine="cuda")


def test_operator_checks_its_arguments():
    for arguments in ((ONE, ONE[:, :4].contiguous()), (ONE, ONE.t()), (ONE[0], ONE)):
        with pytest.raises((ValueError, RuntimeError), match=r"hamming_match: .* must"):
            OPERATOR(*arguments, None, None)
    with pytest.raises((ValueError, RuntimeError), match="must not be negative"):
        OPERATOR(ONE, ONE, -1, None)
