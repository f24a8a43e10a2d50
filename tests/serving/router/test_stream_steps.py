"""What is learnt from a stream of the time of a step, whatever its events hold."""

import json

import pytest

from mooncake_serving.router.call import COMPLETIONS, Call
from mooncake_serving.router.stream_steps import StreamSteps
from tests.serving.router.support import MODEL, tokens_of
from tests.waiting import eventually

PROMPT = tokens_of("How long is a step?")


def event(**content) -> bytes:
    return f"data: {json.dumps(content, separators=(',', ':'))}\n\n".encode()


def usage(num_tokens: int) -> dict:
    return {"prompt_tokens": 3, "completion_tokens": num_tokens, "total_tokens": num_tokens + 3}


def steps_of(*parts: bytes, **body) -> StreamSteps:
    steps = StreamSteps(Call(COMPLETIONS, {"model": MODEL, "stream": True, **body}, b""))
    steps.begin(parts[0])
    for part in parts[1:]:
        steps.add(part)
    return steps


TEXT = event(choices=[{"index": 0, "text": 'it says "completion_tokens": 7, '}])
USAGE = {"stream_options": {"include_usage": True}}


@pytest.mark.parametrize("together", [1, 4])
def test_an_event_of_several_tokens_is_several_steps(together):
    parts = [TEXT * together] * (20 // together)
    steps = steps_of(*parts, event(choices=[], usage=usage(60)), b"data: [DONE]\n\n", **USAGE)
    assert (steps.num_tokens, steps.per_event) == (60, 3.0)


def test_running_totals_end_with_the_last_one():
    parts = [event(choices=[{"index": 0, "text": "a"}], usage=usage(2 * i + 2)) for i in range(10)]
    assert steps_of(*parts, **USAGE).per_event == 2.0


def test_without_totals_an_event_is_a_step():
    steps = steps_of(*[TEXT] * 20, event(choices=[], usage=usage(60)))
    assert (steps.is_told, steps.num_tokens, steps.per_event) == (False, 0, 1.0)


def test_samples_of_one_request_share_their_steps():
    assert steps_of(*[TEXT] * 20, n=2).per_event == 0.5
    last = event(choices=[], usage=usage(60))
    assert steps_of(*[TEXT] * 20, last, n=2, **USAGE).per_event == 1.5


def learnt(router, monkeypatch, **more) -> set[float]:
    """The ratios of what is learnt of a stream's steps to the intervals of its events."""
    placement, intervals, steps = router.router.placement, [], []
    sample, observe = placement.sample, placement.decode_cost.observe
    monkeypatch.setattr(
        placement, "sample", lambda placed, s: (intervals.append(s), sample(placed, s))
    )
    monkeypatch.setattr(
        placement.decode_cost, "observe", lambda b, k, s: (steps.append(s), observe(b, k, s))
    )
    assert router.complete(PROMPT, max_tokens=100, stream=True, **more).status_code == 200
    eventually(lambda: router.last().get("outcome") == "answered")
    assert intervals and len(steps) == len(intervals)
    return {step / interval for step, interval in zip(steps, intervals, strict=True)}


def test_a_step_is_learnt_by_the_tokens_that_the_engine_tells(cluster, monkeypatch):
    router, engines = cluster({"both": "both"})
    engines["both"].tokens_per_event = 4
    assert learnt(router, monkeypatch, **USAGE) == {0.25}


def test_a_stream_without_usage_is_learnt_from_by_its_events(cluster, monkeypatch):
    router, _ = cluster({"both": "both"})
    assert learnt(router, monkeypatch) == {1.0}
