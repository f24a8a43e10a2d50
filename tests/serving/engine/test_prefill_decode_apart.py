"""Prefill in one engine, copy the blocks, decode in another: the tokens are those of one engine."""

import pytest

from mooncake_serving.engine import LayerHooks, OutOfBlocks, SamplingParams

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
TOKEN_FIRST, BLOCK_FIRST = "kv block token head dim", "block layer kv head token dim"


def carry(src_cache, src_blocks, dst_cache, dst_blocks):
    """Copy blocks by hand, layer by layer, through the views that hide the layout."""
    for layer_index in range(src_cache.num_layers):
        pairs = zip(src_cache.layer(layer_index), dst_cache.layer(layer_index), strict=True)
        for src, dst in pairs:
            dst[dst_blocks[: len(src_blocks)]] = src[src_blocks]


def run(engine):
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    return outputs


@pytest.mark.parametrize(("src", "dst"), [(TOKEN_FIRST, BLOCK_FIRST), (BLOCK_FIRST, TOKEN_FIRST)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_disaggregated_tokens_equal_those_of_one_engine(
    make_engine, prompts, src, dst, temperature
):
    params = SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=3)
    want = [generation.token_ids for generation in make_engine().generate(prompts, params)]
    sender, receiver = make_engine(axes=src, chunk_tokens=16), make_engine(axes=dst)
    receiver.reserve(1, SamplingParams(max_tokens=1))  # so that block ids differ on the two sides
    got = {}
    for prompt in prompts:
        done = sender.prefill(prompt, params)
        assert done.num_tokens == len(prompt)
        blocks = receiver.reserve(len(prompt), params)
        assert blocks != done.block_ids
        carry(sender.cache, done.block_ids, receiver.cache, blocks)
        sender.release(done.block_ids)
        got[receiver.add_prefilled(prompt, done.first_token, blocks, params)] = []
    for output in run(receiver):
        assert output.token_index == len(got[output.request_id]), "tokens come in order and whole"
        got[output.request_id].append(output.token_id)
    assert list(got.values()) == want
    assert sender.allocator.num_free == sender.cache.num_blocks
    assert receiver.allocator.num_free == receiver.cache.num_blocks - 1


def test_chunks_are_reported_as_they_finish(make_engine, prompts):
    engine = make_engine(chunk_tokens=30)
    seen = []
    done = engine.prefill(prompts[4], on_chunk=seen.append)
    assert [(chunk.start, chunk.stop) for chunk in seen] == [(0, 30), (30, 60), (60, 71)]
    assert tuple(seen) == done.chunks
    assert all(chunk.block_ids == tuple(done.block_ids) for chunk in seen)
    assert all(chunk.seconds >= 0 and chunk.num_tokens == 71 for chunk in seen)


@pytest.mark.parametrize("num_cached", [1, 8, 37, 70])
def test_cached_prefix_is_not_recomputed(make_engine, prompts, num_cached):
    prompt = prompts[4]
    engine, reused = make_engine(), make_engine(axes=BLOCK_FIRST)
    whole = engine.prefill(prompt)
    blocks = reused.reserve(len(prompt), PARAMS)
    prefix = whole.block_ids[: engine.cache.num_blocks_for(num_cached)]
    carry(engine.cache, prefix, reused.cache, blocks)
    written = []
    done = reused.prefill(
        prompt,
        block_ids=blocks,
        num_cached_tokens=num_cached,
        hooks=LayerHooks(after_write=written.append),
    )
    assert [(chunk.start, chunk.stop) for chunk in done.chunks] == [(num_cached, 71)]
    assert (done.first_token, done.num_cached_tokens) == (whole.first_token, num_cached)
    assert (done.block_ids, written) == (blocks, [0, 1])


def test_missing_blocks_are_allocated(make_engine, prompts):
    prompt = prompts[4]
    [want] = make_engine().generate([prompt], PARAMS)
    engine = make_engine()
    done = engine.prefill(prompt)  # blocks for the prompt only
    engine.add_prefilled(prompt, done.first_token, done.block_ids, PARAMS)
    assert [output.token_id for output in run(engine)] == want.token_ids
    assert engine.allocator.num_free == engine.cache.num_blocks


def test_a_first_token_may_be_the_last(make_engine, prompts):
    engine = make_engine()
    done = engine.prefill(prompts[2])
    params = SamplingParams(max_tokens=1)
    request_id = engine.add_prefilled(prompts[2], done.first_token, done.block_ids, params)
    assert engine.allocator.num_free == engine.cache.num_blocks
    [output] = run(engine)
    assert (output.request_id, output.token_id) == (request_id, done.first_token)
    assert output.finish_reason is not None


@pytest.mark.parametrize("limits", [{"max_requests": 2}, {"max_batch_tokens": 2}])
def test_prefilled_requests_over_the_step_limit_take_turns(make_engine, prompts, limits):
    """None stands still between its first token and its last; first come, first served."""
    engine = make_engine(**limits)
    prompts = [prompt[:20] for prompt in prompts[:4]]
    want = [answer.token_ids for answer in make_engine().generate(prompts, PARAMS)]
    ids, steps = [], {}
    for prompt in prompts:
        done = engine.prefill(prompt, PARAMS)
        ids.append(engine.add_prefilled(prompt, done.first_token, done.block_ids, PARAMS))
    assert (engine.num_running, engine.num_waiting) == (0, 4)
    with pytest.raises(ValueError, match="that no request holds"):
        engine.release(done.block_ids)
    step, got = 0, {request_id: [] for request_id in ids}
    while engine.has_work:
        for output in engine.step():
            steps.setdefault(output.request_id, []).append(step)
            got[output.request_id].append(output.token_id)
        step += 1
    assert list(got.values()) == want
    for index, request_id in enumerate(ids):
        begin = 0 if index < 2 else 11
        assert steps[request_id] == [begin, *range(begin, begin + 11)]


def test_prefilled_requests_come_before_prompts(make_engine, prompts):
    """They hold their blocks, which a prompt may wait for."""
    engine = make_engine(num_blocks=11, max_requests=1)
    done = engine.prefill(prompts[0], PARAMS)
    whole = engine.add_request(prompts[4], PARAMS)  # all 11 blocks
    ids = [engine.add_prefilled(prompts[0], done.first_token, done.block_ids, PARAMS)]
    ends = [output.request_id for output in run(engine) if output.finished]
    assert ends == [*ids, whole]


def test_an_aborted_request_yields_nothing(make_engine, prompts):
    engine = make_engine()
    done = engine.prefill(prompts[2])
    request_id = engine.add_prefilled(prompts[2], done.first_token, done.block_ids, PARAMS)
    assert engine.abort(request_id)
    assert engine.step() == []
    assert engine.allocator.num_free == engine.cache.num_blocks


def test_prefill_decode_and_whole_requests_share_an_engine(make_engine, prompts):
    engine = make_engine(chunk_tokens=16)
    want = [generation.token_ids for generation in engine.generate(prompts, PARAMS)]
    whole = [engine.add_request(prompt, PARAMS) for prompt in prompts[:3]]
    outputs = engine.step()
    done = engine.prefill(prompts[4], PARAMS)
    half = engine.add_prefilled(prompts[4], done.first_token, done.block_ids, PARAMS)
    outputs += run(engine)
    for request_id, tokens in zip([*whole, half], [*want[:3], want[4]], strict=True):
        assert [o.token_id for o in outputs if o.request_id == request_id] == tokens


def test_failing_callback_frees_blocks_allocated_by_prefill(make_engine, prompts):
    engine = make_engine(chunk_tokens=16)
    with pytest.raises(ZeroDivisionError):
        engine.prefill(prompts[4], on_chunk=lambda chunk: 1 / 0)
    assert engine.allocator.num_free == engine.cache.num_blocks
    blocks = engine.reserve(len(prompts[4]))
    with pytest.raises(ZeroDivisionError):
        engine.prefill(prompts[4], block_ids=blocks, on_chunk=lambda chunk: 1 / 0)
    engine.release(blocks)  # the caller's blocks stayed the caller's


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_cached_tokens": -1}, "num_cached_tokens must be at least 0 and less than"),
        ({"num_cached_tokens": 13}, "less than the prompt's 13 tokens, got 13"),
        ({"num_cached_tokens": 8}, "num_cached_tokens must be 0 without block_ids, .* got 8"),
        ({"num_cached_tokens": True}, "num_cached_tokens must be an integer, got True"),
        ({"num_cached_tokens": 1.5}, "num_cached_tokens must be an integer, got 1.5"),
        (
            {"block_ids": [0, 63]},
            r"block_ids\[1\] must be an allocated block that no request holds, got 63",
        ),
        ({"block_ids": [0, 1.5]}, r"block_ids\[1\] must be an integer, got 1.5"),
        ({"block_ids": 3}, "block_ids must be integers, got 3"),
        ({"block_ids": [0]}, r"at least 2 different blocks, got \[0\]"),
        ({"block_ids": [0, 0]}, r"at least 2 different blocks, got \[0, 0\]"),
    ],
)
def test_bad_arguments_of_prefill_are_rejected(make_engine, prompts, arguments, message):
    engine = make_engine()
    assert engine.reserve(1, SamplingParams(max_tokens=1)) == [0]
    with pytest.raises(ValueError, match=message):
        engine.prefill(prompts[2], **arguments)
    assert engine.allocator.num_free == 63


@pytest.mark.parametrize("block_id", ["a", 0.7, True, None])
def test_release_rejects_block_ids_that_are_not_integers(make_engine, block_id):
    engine = make_engine()
    assert engine.reserve(1, SamplingParams(max_tokens=1)) == [0]
    message = rf"release: block_ids\[1\] must be an integer, got {block_id!r}"
    with pytest.raises(ValueError, match=message):
        engine.release([0, block_id])
    assert engine.allocator.num_free == 63


def test_caller_cannot_release_blocks_of_a_running_request(make_engine, prompts):
    engine = make_engine()
    done = engine.prefill(prompts[2])
    engine.add_prefilled(prompts[2], done.first_token, done.block_ids, PARAMS)
    for take in (
        lambda: engine.add_prefilled(prompts[2], done.first_token, done.block_ids, PARAMS),
        lambda: engine.prefill(prompts[2], block_ids=done.block_ids),
        lambda: engine.release(done.block_ids),
    ):
        with pytest.raises(ValueError, match=r"block_ids\[0\] must be .* no request holds"):
            take()
    engine.allocator.share(done.block_ids)  # now they are, too: a prefix that is kept
    engine.release(done.block_ids)
    while engine.has_work:
        engine.step()
    assert engine.allocator.num_free == engine.cache.num_blocks


def test_rejected_request_leaves_the_blocks_with_the_caller(make_engine, prompts):
    engine = make_engine(num_blocks=11)
    done = engine.prefill(prompts[2])  # 2 blocks
    with pytest.raises(ValueError, match=r"prompt_tokens\[0\] must be in \[0, 264\), got 4000"):
        engine.add_prefilled(prompts[2], 4000, done.block_ids, PARAMS)
    other = engine.reserve(60, SamplingParams(max_tokens=12))  # the other 9
    with pytest.raises(OutOfBlocks, match="0 free blocks of 11"):
        engine.add_prefilled(prompts[2], 5, done.block_ids, PARAMS)
    with pytest.raises(OutOfBlocks):
        engine.prefill(prompts[2])
    with pytest.raises(OutOfBlocks):
        engine.reserve(1)
    engine.release([*done.block_ids, *other])
    with pytest.raises(ValueError, match="must be an allocated block"):
        engine.release(other)
    for count in (0, 512):
        with pytest.raises(
            ValueError, match=rf"num_prompt_tokens must be in \[1, 512\), got {count}"
        ):
            engine.reserve(count)
    assert not engine.has_work
