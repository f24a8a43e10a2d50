"""However requests are batched, chunked and queued, each gets the tokens it would get alone."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_serving.engine import (
    Engine,
    LayerHooks,
    Llama,
    NotFinite,
    OutOfBlocks,
    PagedKVCache,
    SamplingParams,
    load_model,
)

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
LAYOUTS = ["kv block token head dim", "block layer kv head token dim"]


@pytest.fixture
def alone(make_engine, prompts):
    """Each prompt's tokens, run by itself and unchunked."""
    return [make_engine().generate([prompt], PARAMS)[0].token_ids for prompt in prompts]


def tokens_of(generations):
    return [generation.token_ids for generation in generations]


@pytest.mark.parametrize("axes", LAYOUTS)
@pytest.mark.parametrize(
    "limits",
    [
        {},
        {"chunk_tokens": 1},
        {"chunk_tokens": 7, "max_batch_tokens": 16},
        {"max_batch_tokens": 3},
        {"max_requests": 2},
        {"num_blocks": 11},  # the longest fits only alone: the others queue
    ],
)
def test_batched_tokens_equal_single_request_tokens(make_engine, prompts, alone, axes, limits):
    engine = make_engine(axes=axes, **limits)
    assert tokens_of(engine.generate(prompts, PARAMS)) == alone
    assert engine.allocator.num_free == engine.cache.num_blocks
    assert not engine.has_work


@given(data=st.data())
@settings(max_examples=15, deadline=None)
def test_tokens_are_right_for_any_limits_and_arrivals(tiny, data):
    """Requests arrive between steps; blocks are few; every request ends with its own tokens."""
    prompts = data.draw(st.lists(st.lists(st.integers(3, 60), min_size=1, max_size=30), max_size=5))
    params = SamplingParams(max_tokens=data.draw(st.integers(1, 6)))
    # Of any prompts, some have two tokens that are almost equally likely: not a bit may differ.
    model = Llama(tiny.config, tiny.weights, batch_invariant=True)

    def make(num_blocks, **limits):
        return Engine(model, PagedKVCache(tiny.config, num_blocks, block_size=4), **limits)

    engine = make(
        data.draw(st.integers(9, 30)),
        max_batch_tokens=data.draw(st.integers(1, 40)),
        chunk_tokens=data.draw(st.integers(1, 40)),
        max_requests=data.draw(st.integers(1, 4)),
    )
    got, todo = {}, list(prompts)
    while todo or engine.has_work:
        if todo and data.draw(st.booleans()):
            got[engine.add_request(todo.pop(0), params)] = []
        for output in engine.step():
            assert output.token_index == len(got[output.request_id])
            got[output.request_id].append(output.token_id)
    want = [make(9).generate([prompt], params)[0].token_ids for prompt in prompts]
    assert list(got.values()) == want
    assert engine.allocator.num_free == engine.cache.num_blocks


def test_open_stream_has_exclusive_use_of_the_engine(make_engine, prompts, alone):
    engine = make_engine()
    stream = engine.stream(prompts[:2], PARAMS)
    got = [next(stream)]
    done = engine.prefill(prompts[2])  # which is not a request of the engine
    for call in (
        lambda: engine.add_request(prompts[2], PARAMS),
        lambda: engine.add_prefilled(prompts[2], done.first_token, done.block_ids, PARAMS),
        lambda: engine.step(),
        lambda: engine.generate(prompts[2:], PARAMS),
    ):
        with pytest.raises(ValueError, match="stream must be finished or closed before, got one"):
            call()
    got += stream
    for index in (0, 1):
        assert [output.token_id for i, output in got if i == index] == alone[index]
    engine.release(done.block_ids)
    next(engine.stream(prompts, PARAMS))  # closed, for nothing refers to it
    assert tokens_of(engine.generate(prompts, PARAMS)) == alone


def test_requests_with_nonfinite_logits_are_reported(make_engine, prompts, alone):
    engine = make_engine()
    bad = engine.add_request(prompts[2], PARAMS)
    engine.step()
    engine.cache.layer(0)[0][engine.scheduler.running[0].block_ids] = float("nan")
    good = engine.add_request(prompts[3], PARAMS)
    with pytest.raises(NotFinite, match=rf"^step: .* requests \[{bad}\]") as caught:
        engine.step()
    assert caught.value.requests == [bad]
    assert engine.abort(bad)
    got = []
    while engine.has_work:
        got += engine.step()
    assert [(output.request_id, output.token_id) for output in got] == [
        (good, token_id) for token_id in alone[3]
    ]


def test_prefill_rejects_nonfinite_logits(make_engine, prompts, state, folder_writer):
    state["model.norm.weight"][0] = float("nan")
    engine = make_engine(model=load_model(folder_writer(state=state))[0])
    with pytest.raises(NotFinite, match="^prefill: logits must be finite"):
        engine.prefill(prompts[2])
    assert engine.allocator.num_free == engine.cache.num_blocks


def test_decodes_come_before_prompts(make_engine, prompts):
    engine = make_engine(max_batch_tokens=8)
    first = engine.add_request(prompts[0], PARAMS)
    assert [output.request_id for output in engine.step()] == [first]
    engine.add_request(prompts[4], PARAMS)
    for _ in range(5):  # 71 tokens, 7 a step with the decode
        assert [output.request_id for output in engine.step()] == [first]


def test_a_request_gets_its_blocks_with_its_first_tokens(make_engine, prompts):
    engine = make_engine(max_batch_tokens=8)
    for _ in range(2):
        engine.add_request(prompts[4], PARAMS)  # 71 tokens each
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 1)


def test_tokens_stream_as_they_come(make_engine, prompts, alone):
    seen = [[] for _ in prompts]
    for index, output in make_engine().stream(prompts, PARAMS):
        assert output.token_index == len(seen[index])
        assert output.finished == (len(seen[index]) == 11)
        seen[index].append(output.token_id)
    assert seen == alone


def test_closing_a_stream_frees_its_blocks(make_engine, prompts):
    engine = make_engine()
    stream = engine.stream(prompts, PARAMS)
    next(stream)
    assert engine.num_running == len(prompts)
    stream.close()
    assert engine.allocator.num_free == engine.cache.num_blocks


def test_eos_and_stop_tokens_end_a_request(make_engine, prompts, alone):
    third = alone[4][2]
    count = alone[4].index(third) + 1
    params = SamplingParams(max_tokens=12, ignore_eos=True, stop_token_ids=(third,))
    [generation] = make_engine().generate([prompts[4]], params)
    assert (generation.token_ids, generation.finish_reason) == (alone[4][:count], "stop")
    [generation] = make_engine().generate([prompts[4]], PARAMS)
    assert generation.finish_reason == "length"


def test_eos_ends_a_request_unless_ignored(tiny, make_engine, prompts, alone):
    model = Llama(replace(tiny.config, eos_token_ids=(alone[4][0],)), tiny.weights)
    [generation] = make_engine(model=model).generate([prompts[4]], SamplingParams())
    assert (generation.token_ids, generation.finish_reason) == (alone[4][:1], "stop")
    [generation] = make_engine(model=model).generate([prompts[4]], PARAMS)
    assert generation.token_ids == alone[4]


def test_generation_stops_at_the_context_length(make_engine):
    prompt = [5] * 509  # of 512
    [generation] = make_engine(num_blocks=64).generate([prompt], PARAMS)
    assert (len(generation.token_ids), generation.finish_reason) == (3, "length")


def test_seeded_sampling_is_independent_of_the_batch(make_engine, prompts):
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=5, ignore_eos=True)
    together = tokens_of(make_engine(chunk_tokens=9).generate(prompts, params))
    lone = [make_engine().generate([prompt], params)[0].token_ids for prompt in prompts]
    assert together == lone
    other = SamplingParams(max_tokens=12, temperature=1.0, seed=6, ignore_eos=True)
    assert tokens_of(make_engine().generate(prompts, other)) != lone


def test_unseeded_requests_draw_independently(make_engine, prompts):
    params = SamplingParams(max_tokens=12, temperature=1.0, ignore_eos=True)
    first, second = make_engine().generate([prompts[4]] * 2, params)
    assert first.token_ids != second.token_ids


def test_abort_frees_waiting_and_running_requests(make_engine, prompts):
    engine = make_engine(num_blocks=11)
    running, waiting = (engine.add_request(prompts[4], PARAMS) for _ in range(2))
    engine.step()
    assert (engine.num_running, engine.num_waiting) == (1, 1)
    assert engine.abort(running)
    assert engine.abort(waiting)
    assert not engine.abort(waiting), "it has ended already"
    assert not engine.abort(12345)
    assert engine.allocator.num_free == 11
    assert engine.step() == []


def test_waiting_for_blocks_held_outside_is_an_error_that_loses_nothing(
    make_engine, prompts, alone
):
    engine = make_engine(num_blocks=11)
    held = engine.reserve(16, SamplingParams(max_tokens=1))
    request_id = engine.add_request(prompts[4], PARAMS)
    with pytest.raises(OutOfBlocks, match=r"1 requests wait for blocks .* held outside the engine"):
        engine.step()
    engine.release(held)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.token_id for output in outputs] == alone[4]
    assert {output.request_id for output in outputs} == {request_id}


def test_failed_step_may_be_retried(make_engine, prompts, alone, monkeypatch):
    engine = make_engine(chunk_tokens=10)
    engine.add_request(prompts[4], PARAMS)
    engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "forward", lambda *a, **k: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    assert [output.token_id for output in outputs] == alone[4]


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "add_request: prompt_tokens must not be empty"),
        ([1] * 512, "shorter than the model's context of 512 tokens, got 512"),
        ([1, 2.5], r"prompt_tokens must be integers, got \[1, 2.5\]"),
        ([1, True], r"prompt_tokens must be integers, got \[1, True\]"),
        (None, "prompt_tokens must be integers, got None"),
        ("12", "prompt_tokens must be integers, got '12'"),
        ([1, 9999], r"prompt_tokens\[1\] must be in \[0, 264\), got 9999"),
        ([1, 2, -1], r"prompt_tokens\[2\] must be in \[0, 264\), got -1"),
        ([1] * 120, r"must fit into 16 blocks of 8 tokens, got 120 \+ 12 tokens"),
    ],
)
def test_bad_prompt_is_rejected(make_engine, prompt, message):
    engine = make_engine(num_blocks=16)
    with pytest.raises(ValueError, match=message):
        engine.add_request(prompt, PARAMS)
    assert not engine.has_work


def test_a_prompt_may_be_an_iterator(make_engine, prompts, alone):
    engine = make_engine()
    assert tokens_of(engine.generate([iter(prompts[0])], PARAMS)) == alone[:1]
    with pytest.raises(ValueError, match="prompt_tokens must be integers, got <list_iter"):
        engine.add_request(iter([1, True]), PARAMS)


@pytest.mark.parametrize("name", ["max_batch_tokens", "chunk_tokens", "max_requests"])
def test_bad_limit_is_rejected(make_engine, name):
    with pytest.raises(ValueError, match=f"Engine: {name} must be positive, got 0"):
        make_engine(**{name: 0})
    for value in ("8", 1.5, True):
        with pytest.raises(ValueError, match=f"Engine: {name} must be an integer, got {value!r}"):
            make_engine(**{name: value})


def test_params_of_another_type_are_rejected(make_engine, prompts):
    engine = make_engine()
    calls = {
        "add_request": lambda: engine.generate(prompts, None),
        "prefill": lambda: engine.prefill(prompts[0], 128),
        "reserve": lambda: engine.reserve(3, None),
    }
    for op, call in calls.items():
        with pytest.raises(ValueError, match=f"{op}: params must be SamplingParams, got"):
            call()
    assert not engine.has_work
    with pytest.raises(ValueError, match="reserve: num_prompt_tokens must be an integer, got '3'"):
        engine.reserve("3")


def test_cache_must_match_the_model(tiny):
    cache = PagedKVCache(tiny.config, 4, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"cache must have the model's layers.*float32.*bfloat16"):
        Engine(tiny, cache)


def test_generate_requires_an_idle_engine(make_engine, prompts):
    engine = make_engine()
    engine.add_request(prompts[0], PARAMS)
    with pytest.raises(ValueError, match="engine must be idle, got 1 unfinished requests"):
        engine.generate(prompts, PARAMS)


def test_empty_input_gives_empty_output(make_engine):
    engine = make_engine()
    assert engine.generate([]) == []
    assert engine.step() == []


def test_prompts_may_come_from_an_iterator(make_engine, prompts, alone):
    engine = make_engine()
    assert tokens_of(engine.generate(iter(prompts), PARAMS)) == alone
    assert len(list(engine.stream(iter(prompts), PARAMS))) == 12 * len(prompts)
    for bad in (3, "12"):
        message = f"^generate: prompts must be lists of token ids, got {bad!r}$"
        with pytest.raises(ValueError, match=message):
            engine.generate(bad)


@pytest.mark.parametrize("moment", ["step", "before_attention", "after_write"])
def test_hooks_around_layers_and_one_that_fails(make_engine, prompts, moment):
    """A step that a hook ends is computed again, from where it began."""
    params, calls, works = SamplingParams(max_tokens=5), [], []
    expected = make_engine().generate(prompts, params)

    def note(what, layer_index=0):
        calls.append((what, layer_index))
        if (what, layer_index) == (moment, int(moment != "step")) and len(works) == 3:
            raise LookupError(moment)

    def on_step(work):
        works.append([(request.num_computed, num_tokens) for request, num_tokens in work])
        note("step")
        return LayerHooks(partial(note, "before_attention"), partial(note, "after_write"))

    engine = make_engine(chunk_tokens=16, on_step=on_step)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    tokens = {request_id: [] for request_id in ids}
    while engine.has_work:
        try:
            outputs = engine.step()
        except LookupError:
            continue
        for output in outputs:
            tokens[output.request_id].append(output.token_id)
    assert [tokens[request_id] for request_id in ids] == [one.token_ids for one in expected]
    assert works[2] == works[3]
    layers = [(what, i) for i in (0, 1) for what in ("before_attention", "after_write")]
    assert calls[:5] == [("step", 0), *layers]
