"""Stats, scale and synth: by hand, and against a trace generated from the profile in this folder.

With MK_TEST_TRACE the path of a real trace, one more test compares a generated trace with it.
"""

import json
import os
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest

from mooncake_serving.conductor import InvalidArgument
from mooncake_simulator.traces import (
    InvalidTrace,
    TraceProfile,
    TraceRequest,
    read_trace,
    scale_trace,
    synth_trace,
    trace_stats,
    write_mooncake,
)
from mooncake_simulator.traces.families import Family, Member, families_of

PROFILE = Path(__file__).parent / "conversation.profile.json"


@pytest.fixture(scope="module")
def profile() -> TraceProfile:
    return TraceProfile.load(PROFILE)


@pytest.fixture(scope="module")
def made_up(profile) -> list[TraceRequest]:
    return synth_trace(profile, 3000, seed=1)


def lru_hit_rate(requests, capacity_tokens: float) -> float:
    """Replay a trace through one cache of blocks that forgets what was used longest ago."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in requests:
        matched = 0
        while matched < len(request.hash_ids) and request.hash_ids[matched] in cache:
            matched += 1
        hits += min(matched * 512, request.input_length)
        for hash_id in request.hash_ids:
            cache[hash_id] = None
            cache.move_to_end(hash_id)
            while len(cache) > capacity_tokens // 512:
                cache.popitem(last=False)
    return hits / sum(request.input_length for request in requests)


def test_stats_by_hand():
    requests = [
        TraceRequest(0, 1000, 10, (0, 1)),
        TraceRequest(1000, 600, 20, (0, 2)),
        TraceRequest(4000, 1500, 60, (0, 1, 3)),
    ]
    stats = trace_stats(requests)
    assert (stats.num_requests, stats.duration_s, stats.requests_per_s) == (3, 4, 0.75)
    assert (stats.num_blocks, stats.num_unique_blocks, stats.seen_once) == (7, 4, 0.5)
    assert stats.max_hit_rate == pytest.approx((0 + 512 + 1024) / 3100)
    assert stats.gap_variation == pytest.approx(0.5)
    assert (stats.input.mean, stats.input.p50, stats.input.max) == (3100 / 3, 1000, 1500)
    assert stats.output.p90 == pytest.approx(52)
    assert json.loads(json.dumps(stats.as_dict()))["output"]["max"] == 60
    assert "requests      3 in 4.0 s: 0.750/s" in str(stats)


def test_stats_of_one_request():
    stats = trace_stats([TraceRequest(7, 5, 1)])
    assert stats.requests_per_s == stats.max_hit_rate == stats.seen_once == 0


def test_stats_match_a_full_replay(made_up):
    assert trace_stats(made_up).max_hit_rate == pytest.approx(lru_hit_rate(made_up, 1e12))


def test_generated_trace_is_valid(made_up, tmp_path):
    write_mooncake(made_up, tmp_path / "trace.jsonl")
    assert read_trace(tmp_path / "trace.jsonl") == made_up
    assert len(made_up) == 3000 and made_up[0].timestamp_ms == 0


def test_seed_determines_the_generated_trace(profile):
    assert synth_trace(profile, 200, seed=3) == synth_trace(profile, 200, seed=3)
    assert synth_trace(profile, 200, seed=3) != synth_trace(profile, 200, seed=4)
    assert len(synth_trace(profile, 1)) == 1


def test_generated_trace_resembles_its_profile(profile, made_up):
    members = [member for family in profile.families for member in family.members]
    stats = trace_stats(made_up)
    lengths = [member.input_length for member in members]
    assert stats.input.mean == pytest.approx(np.mean(lengths), rel=0.05)
    assert stats.input.p90 == pytest.approx(np.percentile(lengths, 90), rel=0.05)
    outputs = [member.output_length for member in members]
    assert stats.output.mean == pytest.approx(np.mean(outputs), rel=0.05)
    shared = sum(min(512 * m.matched_blocks, m.input_length) for m in members)
    assert stats.max_hit_rate == pytest.approx(shared / sum(lengths), abs=0.03)
    rate = np.mean(profile.counts) / np.mean(profile.gaps_ms) * 1e3
    assert stats.requests_per_s == pytest.approx(rate, rel=0.1)


def families(requests):
    """What each family is like, but for when its members come."""
    hubs, found = families_of(requests, 60)
    shapes = (
        (f.hub, *((m.input_length, m.parent, m.matched_blocks) for m in f.members)) for f in found
    )
    return len(hubs), sorted(shapes)


def test_families_by_hand():
    requests = [
        TraceRequest(0, 1000, 1, (0, 1)),
        TraceRequest(0, 600, 2, (0, 2)),
        TraceRequest(0, 1500, 3, (0, 1, 3)),
        TraceRequest(0, 100, 4, (4,)),
        TraceRequest(0, 1536, 5, (0, 1, 3)),
        TraceRequest(0, 512, 6, (0,)),
        TraceRequest(0, 1100, 7, (0, 1, 5)),
        TraceRequest(0, 1600, 8, (0, 1, 3, 6)),
        TraceRequest(0, 1, 9),
    ]
    hubs, found = families_of(requests, 5)
    assert hubs == [-1], "block 0, which 7 of them begin with"
    turns = Family(
        0,
        (
            Member(0, 1000, 1, 0, 0),
            Member(2, 1500, 3, 0, 2),
            Member(2, 1536, 5, 1, 3),
            Member(2, 1100, 7, 2, 2),
            Member(1, 1600, 8, 2, 3),
        ),
    )
    alone = [(0, 600, 2), (-1, 100, 4), (0, 512, 6), (-1, 1, 9)]
    assert found == [turns, *(Family(hub, (Member(0, n, out, 0, 0),)) for hub, n, out in alone)]
    assert families_of(requests, 4)[0] == [-1, 0], "and block 1 after it"


@pytest.mark.parametrize("num_requests", [500, 3000, 9000])
def test_families_stay_together_at_any_trace_length(profile, num_requests):
    requests = synth_trace(profile, num_requests, seed=2)
    assert len(requests) == num_requests
    assert all(len(r.hash_ids) == -(-r.input_length // 512) for r in requests)
    known = {f.members: f.hub for f in profile.families}
    by_shape = {tuple((m.input_length, m.matched_blocks) for m in members) for members in known}
    _, found = families_of(requests, num_requests // 2)
    shapes = [tuple((m.input_length, m.matched_blocks) for m in family.members) for family in found]
    assert sum(shape not in by_shape for shape in shapes) <= 1, "the last one is cut short"


def test_full_profile_regenerates_the_same_families(made_up):
    whole = TraceProfile.of(made_up, max_requests=len(made_up))
    again = synth_trace(whole, len(made_up), seed=9)
    assert families(again) == families(made_up)
    for capacity in (1e6, 3e6, 1e7, 1e9):
        expected = lru_hit_rate(made_up, capacity)
        assert lru_hit_rate(again, capacity) == pytest.approx(expected, abs=0.02)


@pytest.mark.skipif("MK_TEST_TRACE" not in os.environ, reason="no path in MK_TEST_TRACE")
def test_generated_trace_resembles_the_real_one():
    real = read_trace(os.environ["MK_TEST_TRACE"])
    ours = synth_trace(TraceProfile.of(real), len(real))
    for capacity in (1e6, 3e6, 1e7, 3e7, 1e12):
        expected = lru_hit_rate(real, capacity)
        assert lru_hit_rate(ours, capacity) == pytest.approx(expected, abs=0.01)
    theirs = trace_stats(real)
    assert trace_stats(ours).input.mean == pytest.approx(theirs.input.mean, rel=0.03)
    assert trace_stats(ours).num_unique_blocks == pytest.approx(theirs.num_unique_blocks, rel=0.03)


def test_profile_round_trips_through_a_file(profile, tmp_path):
    profile.save(tmp_path / "profile.json")
    assert TraceProfile.load(tmp_path / "profile.json") == profile
    assert sum(len(f.members) for f in profile.families) == 1021 and "Apache-2.0" in profile.source


def profile_text(families: str) -> str:
    rest = '"block_size": 512, "hubs": [], "gaps_ms": [1], "counts": [1]'
    return f'{{{rest}, "families": {families}}}'


@pytest.mark.parametrize(
    "text, message",
    [
        (
            "{",
            "json, line 1: must be a profile of a trace: Expecting property name .* at column 2$",
        ),
        ('{"a": 1,\n\n  x', "json, line 3: must be a profile of a trace: .* at column 3$"),
        ("{}", "must be a profile of a trace: KeyError 'block_size'"),
        ("[1, 2]", "must be a profile of a trace: TypeError"),
        (profile_text("[]"), "a list is empty"),
        (profile_text("[[-1]]"), "a number out of its range"),
        (profile_text("[[-1, [0, 0, 1, 0, 0]]]"), "a number out of its range"),
        (profile_text("[[0, [0, 1, 1, 0, 0]]]"), "a number out of its range"),
        (profile_text("[[-1, [0, 9, 1, 0, 0], [1, 9, 1, 1, 1]]]"), "a number out of its range"),
        (profile_text("[[-1, [0, 9, 1]]]"), "TypeError"),
    ],
)
def test_bad_profile_is_rejected(tmp_path, text, message):
    path = tmp_path / "profile.json"
    path.write_text(text)
    with pytest.raises(InvalidTrace, match=message):
        TraceProfile.load(path)


def test_time_scaling_stretches_timestamps(made_up):
    faster = scale_trace(made_up, time=0.5)
    assert [r.timestamp_ms for r in faster] == [r.timestamp_ms / 2 for r in made_up]
    assert [r.hash_ids for r in faster] == [r.hash_ids for r in made_up]


def test_more_load_adds_other_users_at_the_same_times(made_up):
    double, one = trace_stats(scale_trace(made_up, load=2)), trace_stats(made_up)
    assert double.num_requests == 6000
    assert double.num_unique_blocks == 2 * one.num_unique_blocks
    assert double.duration_s <= one.duration_s
    assert double.max_hit_rate == pytest.approx(one.max_hit_rate, abs=0.02)
    times = [r.timestamp_ms for r in scale_trace(made_up, load=2)]
    assert times == sorted(times)


def test_less_load_samples_requests_uniformly(made_up):
    third = scale_trace(made_up, load=0.3, seed=2)
    assert 800 < len(third) < 1000
    assert set(third) <= set(made_up) and third == scale_trace(made_up, load=0.3, seed=2)
    assert len(scale_trace(made_up, load=1.5)) == pytest.approx(4500, rel=0.05)
    assert scale_trace([], load=2) == []


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: trace_stats([]), "a trace must hold at least one request"),
        (lambda: TraceProfile.of([]), "a trace must hold at least one request"),
    ],
)
def test_unusable_traces_are_rejected(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: scale_trace([], time=0), "scale_trace: time must be positive, got 0"),
        (lambda: scale_trace([], time="1"), "scale_trace: time must be positive, got '1'"),
        (lambda: scale_trace([], load=float("inf")), "load must be positive, got inf"),
        (
            lambda: scale_trace([TraceRequest(0.0, 5, 1, (0,))], load=1e9),
            "load must make at most 10,000,000 requests of 1, got 1e",
        ),
        (lambda: scale_trace([], seed=-1), "scale_trace: seed must be at least 0, got -1"),
        (lambda: synth_trace(TraceProfile.load(PROFILE), 0), "num_requests must be at least 1"),
        (
            lambda: synth_trace(TraceProfile.load(PROFILE), 3, seed=-1),
            "synth_trace: seed must be at least 0, got -1",
        ),
        (lambda: synth_trace(5, 3), "synth_trace: profile must be a TraceProfile, got 5"),
        (lambda: read_trace(5), "read_trace: path must be a path, got 5"),
    ],
)
def test_bad_arguments_are_rejected(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()
