"""An engine of three processes: tokens of one alone, whatever is under way at once."""

import os
import random
import signal

import pytest
import torch

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.conductor.costs.fitted import PolynomialPrefill
from mooncake_serving.engine import (
    Engine,
    LayerHooks,
    NotFinite,
    PagedKVCache,
    SamplingParams,
    load_model,
)
from mooncake_serving.engine.errors import WorkerFailed
from mooncake_serving.engine.pipeline import GroupOptions, PipelinedEngine, StageGroup
from mooncake_serving.engine.pipeline.sizes import TILE, StepSizes, fit_cost
from mooncake_serving.engine.pipeline.stage import divide_layers
from mooncake_serving.engine.request import Request
from tests.serving.conftest import LAYER_SHAPES, VOCABULARY, random_state, write_folder
from tests.waiting import eventually

NUM_LAYERS, NUM_BLOCKS, BLOCK, CHUNK = 4, 64, 8, 32


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Of this process: the stages have the processors, too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of four layers, which are not alike."""
    generator = torch.Generator().manual_seed(3)
    state = random_state()
    for index in range(NUM_LAYERS):
        for name, shape in LAYER_SHAPES.items():
            drawn = torch.randn(shape, generator=generator) * (0.2 if len(shape) == 2 else 0.1)
            state[f"model.layers.{index}.{name}.weight"] = drawn + (len(shape) == 1)
    config = {"num_hidden_layers": NUM_LAYERS}
    return write_folder(tmp_path_factory.mktemp("pipeline") / "model", config=config, state=state)


@pytest.fixture(scope="module")
def model(folder):
    return load_model(folder, batch_invariant=True)[0]


@pytest.fixture(scope="module")
def group(folder, model):
    options = GroupOptions(str(folder), 3, NUM_BLOCKS, BLOCK, 64, batch_invariant=True)
    with StageGroup(model, options) as made:
        yield made


@pytest.fixture(scope="module")
def alone(model):
    """The tokens of one engine that computes each prompt alone."""
    cache = PagedKVCache(model.config, NUM_BLOCKS, block_size=BLOCK)

    def generate(prompt, params):
        return Engine(model, cache, chunk_tokens=CHUNK).generate([prompt], params)[0]

    return generate


def draw_prompt(draw: random.Random, least: int, most: int) -> list[int]:
    return [draw.randrange(3, len(VOCABULARY)) for _ in range(draw.randint(least, most))]


def test_greedy_and_seeded_tokens_are_those_of_one_process(group, alone, prompts):
    engine = PipelinedEngine(group, chunk_tokens=CHUNK)
    for params in (
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, temperature=1.2, top_p=0.9, seed=(1 << 64) - 1),
    ):
        assert engine.generate(prompts, params) == [alone(prompt, params) for prompt in prompts]
    assert engine.allocator.num_free == NUM_BLOCKS


def test_chunks_of_one_prompt_are_under_way_at_once(group, alone):
    engine = PipelinedEngine(group, chunk_tokens=CHUNK)
    prompt = draw_prompt(random.Random(1), 200, 200)
    params = SamplingParams(max_tokens=1)
    os.kill(group.pids[-1], signal.SIGSTOP)  # so that no step is done
    try:
        request_id = engine.add_request(prompt, params)
        for _ in range(group.options.num_slots + 3):
            assert engine.step() == []
        assert not group.has_room
        request = engine._requests[request_id]
        assert request.num_computed == 0 and request.num_under_way >= 6 * TILE
    finally:
        os.kill(group.pids[-1], signal.SIGCONT)
    tokens = []
    while engine.has_work:
        tokens += [output.token_id for output in engine.step()]
    assert tokens == alone(prompt, params).token_ids


def test_random_load_with_prefixes_and_aborts(group, alone, soak):
    """Requests come and go at random; blocks are few, so they are used again at once."""
    computed = {}

    def on_step(work):
        ends = [(r, r.num_computed + r.num_under_way + num_tokens) for r, num_tokens in work]

        def written(layer_index):
            assert layer_index == group.cache.num_layers - 1, "the last, of all stages"
            for request, end in ends:
                assert computed.get(request.request_id, -1) < end
                assert request.num_computed < end, "it advances behind that"
                computed[request.request_id] = end

        return LayerHooks(None, written)

    engine = PipelinedEngine(
        group, chunk_tokens=CHUNK, max_requests=6, keep_prefixes=True, on_step=on_step
    )
    draw = random.Random(11)
    beginnings = [[], *(draw_prompt(draw, 30, 90) for _ in range(3))]
    running, tokens, num_aborted, num_cached = {}, {}, 0, 0
    num_left = 1500 if soak else 70
    while num_left or engine.has_work:
        if num_left and len(running) < 9 and draw.random() < 0.4:
            num_left -= 1
            prompt = draw.choice(beginnings) + draw_prompt(draw, 1, 60)
            params = SamplingParams(
                max_tokens=draw.randint(1, 12),
                temperature=draw.choice([0, 1]),
                seed=draw.randint(-(1 << 63), (1 << 64) - 1),
            )
            running[engine.add_request(prompt, params)] = prompt, params
        if running and draw.random() < 0.08:
            request_id = draw.choice([*running])
            del running[request_id]
            num_aborted += engine.abort(request_id)  # False: it ended while stages computed it
        for output in engine.step() if engine.has_work else ():
            request = engine._requests.get(output.request_id)
            if request is not None:
                num_cached += request.num_cached_tokens
            tokens.setdefault(output.request_id, []).append(output.token_id)
            if output.finished:
                prompt, params = running.pop(output.request_id)
                expected = alone(prompt, params)
                assert tokens[output.request_id] == expected.token_ids
                assert output.finish_reason == expected.finish_reason
    assert engine.allocator.num_free == NUM_BLOCKS
    assert num_aborted > 3 and num_cached > 0


def test_only_requests_that_are_not_finite_fail(group, alone, prompts):
    engine = PipelinedEngine(group, chunk_tokens=CHUNK)
    params = SamplingParams(max_tokens=4)
    good = engine.add_request(prompts[3], params)
    blocks = engine.reserve(len(prompts[4]), params)
    keys, _ = engine.cache.layer(NUM_LAYERS - 1)  # of the last stage: the cache is of all
    keys[blocks[0]] = torch.nan
    bad = engine.add_request(prompts[4], params, block_ids=blocks, num_cached_tokens=BLOCK)
    tokens = []
    failed = None
    while engine.has_work:
        try:
            tokens += [output.token_id for output in engine.step()]
        except NotFinite as error:
            failed = error.requests
            assert engine.abort(bad)
    keys[blocks[0]] = 0
    assert failed == [bad] != [good]
    assert tokens == alone(prompts[3], params).token_ids
    assert engine.allocator.num_free == NUM_BLOCKS


def test_prefill_of_one_process_is_refused(group):
    engine = PipelinedEngine(group, chunk_tokens=CHUNK)
    with pytest.raises(InvalidArgument, match="prefill: engine must have all layers"):
        engine.prefill([7, 8])
    with pytest.raises(InvalidArgument, match="prefill_selected: engine must have all layers"):
        engine.prefill_selected([7, 8], block_ids=[0], is_reused=None)


@pytest.mark.parametrize("num_stages", [5, 1])
def test_number_of_stages_is_checked(folder, model, num_stages):
    with pytest.raises(InvalidArgument, match="num_stages must be at (most|least)"):
        StageGroup(model, GroupOptions(str(folder), num_stages, NUM_BLOCKS))


def test_layers_are_contiguous_and_all_there():
    assert divide_layers(7, 3) == [range(2), range(2, 4), range(4, 7)]
    assert divide_layers(4, 4) == [range(i, i + 1) for i in range(4)]


def test_chunks_shrink_so_that_steps_take_equally_long():
    cost = PolynomialPrefill(base_s=0.01, per_token_s=1e-3, per_pair_s=1e-6)
    sizes = StepSizes(cost, 512)
    request = Request(0, [0] * 8000, 8000, SamplingParams(), 0, 1)
    steps = []
    while request.num_pending:
        [(_, num_tokens)] = sizes.cut([(request, min(512, request.num_pending))])
        start = request.num_computed
        request.num_computed += num_tokens
        steps.append((num_tokens, float(cost.seconds(request.num_computed, start))))
    chunks = [num_tokens for num_tokens, _ in steps]
    assert chunks[0] == 512 and chunks[:-1] == sorted(chunks[:-1], reverse=True)
    assert chunks[-2] < 128 and all(chunk % TILE == 0 for chunk in chunks[:-1])
    whole_s = float(cost.seconds(512, 0))
    assert all(0.87 * whole_s <= seconds <= 1.13 * whole_s for _, seconds in steps[:-1])


def test_a_step_has_time_for_decodes_and_a_tile_of_a_prompt():
    cost = PolynomialPrefill(base_s=0.0, per_token_s=1e-3, per_pair_s=1e-4)
    sizes = StepSizes(cost, 64)
    decodes = [
        Request(i, [0] * 2000, 1990, SamplingParams(), 0, 20, num_computed=1999) for i in range(3)
    ]
    prompts = [Request(i, [0] * 500, 500, SamplingParams(), 0, 1) for i in (3, 4)]
    work = [*((one, 1) for one in decodes), *((one, 64) for one in prompts)]
    assert sizes.cut(work) == [*((one, 1) for one in decodes), (prompts[0], TILE)]


def test_cost_is_fitted_to_measured_chunks():
    called = []
    cost = fit_cost(lambda *shape: called.append(shape), 128, 300)
    assert {*called} == {(128, 0), (64, 0), (128, 172)}
    assert cost.per_token_s >= 0 and float(cost.seconds(128, 0)) > 0


def test_stage_that_cannot_load_says_why(folder, model, tmp_path):
    options = GroupOptions(str(tmp_path / "none"), 2, NUM_BLOCKS)
    with pytest.raises(WorkerFailed, match="the stage 1 process failed: ModelNotFound: "):
        StageGroup(model, options)


def test_death_of_a_stage_ends_the_group(group):
    """The last test of the group."""
    engine = PipelinedEngine(group, chunk_tokens=CHUNK)
    told = []
    group.watch(told.append)
    engine.add_request([9] * 40)
    os.kill(group.pids[0], signal.SIGKILL)
    killed = "the stage 1 process was killed by signal 9"
    with pytest.raises(WorkerFailed, match=f"{killed}|the next stage is out of reach"):
        while True:
            engine.step()
    eventually(lambda: told)
    assert str(told[0]) == killed
