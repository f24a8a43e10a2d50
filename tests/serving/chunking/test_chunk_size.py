"""Chunk sizes: SARATHI's rules on made-up machines, and what a profile measures."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kernels import InvalidArgument
from mooncake_serving.chunking import ChunkProfile, choose_chunk_size, profile_chunks

TILE = 128
SIZES = tuple(range(TILE, 2049, TILE))


def roofline(saturation: int) -> ChunkProfile:
    """Steps bound by reading the weights up to that many tokens, and by arithmetic beyond."""
    return ChunkProfile(SIZES, tuple(float(max(saturation, size)) for size in SIZES))


@pytest.mark.parametrize("num_decodes", [0, 1, 17, 127, 128, 200])
def test_chunk_and_decodes_fill_tiles(num_decodes: int) -> None:
    """SARATHI: 256 tokens a step, of which B - 1 are decodes, are a chunk of 256 - (B - 1)."""
    chunk = choose_chunk_size(roofline(256), num_decodes)
    assert chunk >= 1 and (chunk + num_decodes) % TILE == 0


def test_smallest_saturating_chunk_is_chosen_without_a_ratio() -> None:
    assert choose_chunk_size(roofline(512), 0) == 512
    assert choose_chunk_size(roofline(512), 17) == 512 - 17
    assert choose_chunk_size(roofline(128), 0) == 128


def test_max_loss_allows_a_smaller_chunk() -> None:
    """Chunks of 256 cost 12.5 % of the peak, 512 none."""
    profile = ChunkProfile((256, 512, 1024), (256 * 1.125, 512.0, 1024.0))
    chosen = {
        loss: choose_chunk_size(profile, 0, tile=256, max_loss=loss) for loss in (0.0, 0.12, 0.13)
    }
    assert chosen == {0.0: 512, 0.12: 512, 0.13: 256}


@pytest.mark.parametrize("num_decodes", [16, 17, 64])
@pytest.mark.parametrize("step", [256, 512, 1024])
def test_the_peak_is_where_chunks_carry_all_decodes(num_decodes: int, step: int) -> None:
    """SARATHI, section 5: throughput is largest at P:D = C / (B - 1)."""
    chunk = step - num_decodes
    found = choose_chunk_size(
        roofline(256), num_decodes, prefill_per_decode=chunk / num_decodes, max_loss=0
    )
    assert found == chunk


def test_few_prompt_tokens_make_small_chunks() -> None:
    profile, ratios = roofline(256), [1.0, 5.0, 14.0, 30.0, 100.0, 1e6]
    chunks = [choose_chunk_size(profile, 17, prefill_per_decode=r, max_loss=0) for r in ratios]
    assert chunks == sorted(chunks) and chunks[0] == 128 - 17 and chunks[-1] == 2048 - 17


def test_a_cost_by_hand() -> None:
    """One decode with 127 or 255 prompt tokens, P:D 200, of steps of 1.0 s and 1.5 s.

    127: 200 / 127 s a decode token. 255: 200 / 255 chunks of 1.5 s carry as many decodes, and the
    others, 55 of 255, take steps of 1 s. So 1.575 s and 1.392 s.
    """
    profile = ChunkProfile((128, 256), (1.0, 1.5))
    small, large = 200 / 127, 200 / 255 * 1.5 + (1 - 200 / 255)
    for loss, chunk in ((small / large - 1 - 1e-9, 255), (small / large - 1 + 1e-9, 127)):
        found = choose_chunk_size(profile, 1, prefill_per_decode=200.0, max_loss=loss)
        assert found == chunk


def test_tbt_limit_bounds_the_step() -> None:
    """Sarathi-Serve: the budget is the largest multiple of the tile that keeps the promise."""
    profile = ChunkProfile(SIZES, tuple(0.01 * size for size in SIZES))
    for promise, step in ((1.28, 128), (5.13, 512), (6.39, 512), (6.4, 640), (100.0, 2048)):
        chunk = choose_chunk_size(
            profile, 40, prefill_per_decode=1e9, max_step_seconds=promise, max_loss=0
        )
        assert chunk <= step - 40
        assert profile.step_seconds(chunk + 40) <= promise
    with pytest.raises(InvalidArgument, match=r"max_step_seconds must be 1.28 or more, got 1.27"):
        choose_chunk_size(profile, 40, max_step_seconds=1.27)
    falling = ChunkProfile((128, 256), (0.1, 0.05))
    with pytest.raises(InvalidArgument, match=r"max_step_seconds must be 0.05 or more, got 0.04"):
        choose_chunk_size(falling, 0, max_step_seconds=0.04)
    assert choose_chunk_size(falling, 0, max_step_seconds=0.05) == 256


@given(
    increments=st.lists(st.floats(0.0, 3.0), min_size=len(SIZES), max_size=len(SIZES)),
    num_decodes=st.integers(0, 1919),
    ratio=st.none() | st.floats(0.01, 1e4),
    promise=st.floats(0.1, 60.0),
)
def test_choice_for_any_profile(
    increments: list[float], num_decodes: int, ratio: float | None, promise: float
) -> None:
    seconds = [1.0]
    for more in increments[1:]:
        seconds.append(seconds[-1] + more)
    profile = ChunkProfile(SIZES, tuple(seconds))
    options = {"prefill_per_decode": ratio, "max_step_seconds": promise}
    smallest = (num_decodes // TILE + 1) * TILE
    if profile.step_seconds(smallest) > promise:
        with pytest.raises(InvalidArgument, match="max_step_seconds"):
            choose_chunk_size(profile, num_decodes, **options)
        return
    chunk = choose_chunk_size(profile, num_decodes, **options)
    assert chunk > 0 and (chunk + num_decodes) % TILE == 0
    assert profile.step_seconds(chunk + num_decodes) <= promise


@pytest.mark.parametrize(
    ("num_decodes", "options", "words"),
    [
        (-1, {}, "num_decodes must be an integer of at least 0, got -1"),
        pytest.param(-(10**5000), {}, "num_decodes must be .* got a huge int", id="huge"),
        (1.5, {}, "num_decodes must be an integer of at least 0, got 1.5"),
        ("3", {}, "num_decodes must be an integer of at least 0, got '3'"),
        (2048, {}, "num_decodes must be less than the last multiple of 128 within the 2048 tokens"),
        (1, {"tile": 0}, "tile must be an integer of at least 1, got 0"),
        (1, {"tile": 128.0}, "tile must be an integer of at least 1, got 128.0"),
        (1, {"prefill_per_decode": 0.0}, "prefill_per_decode must be a positive number, got 0.0"),
        (1, {"prefill_per_decode": "14"}, "prefill_per_decode must be a positive number"),
        (1, {"max_loss": -0.1}, "max_loss must be a number of at least 0, got -0.1"),
        (1, {"max_loss": None}, "max_loss must be a number of at least 0, got None"),
        (1, {"max_step_seconds": None}, "max_step_seconds must be a number, got None"),
    ],
)
def test_bad_numbers_are_rejected(num_decodes: int, options: dict, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        choose_chunk_size(roofline(256), num_decodes, **options)
    with pytest.raises(InvalidArgument, match="profile must be a ChunkProfile, got None"):
        choose_chunk_size(None, 1)


def test_step_time_is_interpolated_linearly() -> None:
    profile = ChunkProfile((128, 256), (1.0, 3.0))
    times = [profile.step_seconds(n) for n in (1, 128, 160, 256)]
    assert times == [1.0, 1.0, 1.5, 3.0]
    with pytest.raises(InvalidArgument, match="at most 256, the largest size measured, got 257"):
        profile.step_seconds(257)
    with pytest.raises(InvalidArgument, match="num_tokens must be at most 256, .*, got None"):
        profile.step_seconds(None)


@pytest.mark.parametrize(
    ("sizes", "seconds", "words"),
    [
        ((), (), "sizes must ascend"),
        ((0, 128), (1.0, 1.0), "sizes must ascend and be at least 1"),
        ((128, 128), (1.0, 1.0), "sizes must ascend"),
        ((128,), (1.0, 2.0), r"one a size \(1\)"),
        ((128,), (0.0,), "seconds must be positive"),
        (128, (1.0,), "sizes must ascend and be at least 1, got 128"),
        ((128.5,), (1.0,), "sizes must ascend"),
        (("128",), (1.0,), "sizes must ascend"),
        ((128,), 1.0, "seconds must be positive, .*, got 1.0"),
        ((128,), ("1",), "seconds must be positive"),
        ((128,), (math.nan,), "seconds must be positive"),
        ((128,), (math.inf,), "seconds must be positive, finite"),
    ],
)
def test_bad_profiles_are_rejected(sizes: tuple, seconds: tuple, words: str) -> None:
    with pytest.raises(InvalidArgument, match=words):
        ChunkProfile(sizes, seconds)


def test_a_profile_is_the_median_of_warm_calls() -> None:
    calls: list[int] = []
    now = 0.0

    def run(num_tokens: int) -> None:
        nonlocal now
        slow = {0: 100.0, 2: 50.0}.get(calls.count(num_tokens), 1.0)  # the first, and one hiccup
        calls.append(num_tokens)
        now += slow * num_tokens

    profile = profile_chunks(run, [2, 5], clock=lambda: now)
    assert profile == ChunkProfile((2, 5), (2.0, 5.0))
    assert calls == [2] * 4 + [5] * 4
    with pytest.raises(InvalidArgument, match="repeats must be an integer of at least 1, got 0"):
        profile_chunks(run, [2], repeats=0)
    with pytest.raises(InvalidArgument, match="repeats must be .*, got '3'"):
        profile_chunks(run, [2], repeats="3")
