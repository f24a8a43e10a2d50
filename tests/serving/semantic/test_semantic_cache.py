"""Prompts are kept, found, reused, evicted and forgotten; what was reused is reported."""

import pytest
import torch

from mooncake_serving.engine import Batch, Chunk, OutOfBlocks, SamplingParams, SemanticCache
from mooncake_serving.semantic import Recompute, SignatureIndex, Signer

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture
def make(deep_engine):
    """Build (engine, cache) for short prompts."""

    def build(num_blocks=24, *, engine=None, **options):
        engine = engine or deep_engine()
        return engine, SemanticCache(engine, num_blocks, **({"min_tokens": 1} | options))

    return build


def kept(engine, cache, tokens):
    """Prefill and keep a prompt, and hold no block of it."""
    done, reuse, prompt_id = cache.prefill(tokens, keep="exact")
    assert reuse.prompt_id is None and prompt_id is not None
    engine.release(done.block_ids)
    return prompt_id


def logits_after(engine, tokens, block_ids, following):
    """What the engine's model says after one more token, over these blocks."""
    chunk = Chunk([following], len(tokens), block_ids)
    return engine.model.forward(Batch.build([chunk], engine.cache.block_size), engine.cache)


def test_same_prompt_is_an_exact_cached_prefix(make, draw):
    tokens = draw(45, 1)
    engine, cache = make()
    prompt_id = kept(engine, cache, tokens)
    done, reuse, _ = cache.prefill(tokens)
    assert (reuse.prompt_id, reuse.similarity, reuse.num_exact_tokens) == (prompt_id, 1.0, 44)
    assert reuse.computed_by_layer == (1,) * 5 and not reuse.is_approximate
    assert (done.num_tokens, done.num_cached_tokens) == (45, 44)
    whole = engine.prefill(tokens)
    prefix = engine.prefill(tokens, block_ids=whole.block_ids, num_cached_tokens=44)
    assert done.first_token == prefix.first_token
    for layer in range(5):
        for part in engine.cache.layer(layer):
            got, want = (part[ids].flatten(0, 1)[:45] for ids in (done.block_ids, prefix.block_ids))
            assert torch.equal(got, want)


def test_prompt_with_a_new_beginning_reuses_the_rest(make, draw):
    document = draw(60, 1)
    engine, cache = make(recompute=Recompute(share=0.2, decay=0.5, floor=0), threshold=0.5)
    prompt_id = kept(engine, cache, document)
    tokens = draw(7, 2) + document
    done, reuse, name = cache.prefill(tokens)
    assert reuse.prompt_id == prompt_id and 0.5 <= reuse.similarity < 1 and name is None
    assert reuse.num_exact_tokens == 0 and reuse.num_matched_tokens >= 60 - 4  # the seam
    counts = reuse.computed_by_layer
    assert counts[:2] == (67, 67) and list(counts) == sorted(counts, reverse=True)
    assert counts[2] < 30 and reuse.is_approximate
    assert done.num_tokens == 67 and len(done.chunks) == 1


def test_shared_beginning_is_exact_and_the_rest_approximate(make, draw):
    document = draw(60, 1)
    engine, cache = make(threshold=0.5)
    kept(engine, cache, document)
    tokens = document[:20] + draw(3, 2) + document[20:]
    done, reuse, _ = cache.prefill(tokens)
    assert reuse.num_exact_tokens == done.num_cached_tokens == 20
    assert reuse.computed_by_layer[0] == 43
    whole = engine.prefill(tokens)
    for layer in range(5):
        for part in engine.cache.layer(layer):
            got, want = (part[ids].flatten(0, 1)[:20] for ids in (done.block_ids, whole.block_ids))
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def check_is_prefix_reuse(engine, done, reuse, tokens, num_exact):
    """Nothing but what follows the beginning was computed, and to the bit as prefix reuse does."""
    num_left = len(tokens) - num_exact
    assert not reuse.is_approximate and reuse.computed_by_layer == (num_left,) * 5
    assert (reuse.num_exact_tokens, reuse.num_matched_tokens) == (num_exact, 0)
    assert (done.num_tokens, done.num_cached_tokens) == (len(tokens), num_exact)
    whole = engine.prefill(tokens)
    prefix = engine.prefill(tokens, block_ids=whole.block_ids, num_cached_tokens=num_exact)
    assert done.first_token == prefix.first_token
    for layer in range(5):
        for part in engine.cache.layer(layer):
            sides = (
                part[ids].flatten(0, 1)[: len(tokens)] for ids in (done.block_ids, prefix.block_ids)
            )
            assert torch.equal(*sides)


def test_an_identical_prompt_wins_over_one_that_contains_it(make, draw):
    tokens = draw(60, 1)
    engine, cache = make(num_blocks=64)
    prompt_id = kept(engine, cache, tokens)
    longer = draw(7, 2) + tokens
    cache.keep(longer, engine.prefill(longer).block_ids)
    done, reuse, _ = cache.prefill(tokens)
    assert reuse.prompt_id == prompt_id
    check_is_prefix_reuse(engine, done, reuse, tokens, 59)


@pytest.mark.parametrize("min_tokens", [1, 1000])
def test_prefix_prompt_wins_over_a_rearranged_one(make, deep_engine, draw, min_tokens):
    document, question = draw(100, 1), draw(10, 9)
    engine, cache = make(64, engine=deep_engine(num_blocks=128), min_tokens=min_tokens)
    prompt_id = kept(engine, cache, document)
    moved = document[50:] + document[:50] + question
    cache.keep(moved, engine.prefill(moved).block_ids)
    done, reuse, _ = cache.prefill(document + question)
    assert reuse.prompt_id == prompt_id
    check_is_prefix_reuse(engine, done, reuse, document + question, 100)


def test_exact_prefix_counts_below_the_threshold(make, draw):
    document = draw(40, 1)
    engine, cache = make(threshold=1.0)
    prompt_id = kept(engine, cache, document + draw(20, 2))
    tokens = document + draw(30, 3)
    done, reuse, name = cache.prefill(tokens, keep="exact")
    assert reuse.prompt_id == prompt_id and reuse.similarity < 1 and name in cache
    check_is_prefix_reuse(engine, done, reuse, tokens, 40)


def test_similar_prompt_wins_over_a_short_exact_prefix(make, draw):
    beginning, document = draw(16, 1), draw(100, 2)
    engine, cache = make(64, threshold=0.5)
    kept(engine, cache, beginning + draw(5, 3))
    similar = cache.keep(document, engine.prefill(document).block_ids)
    reuse = cache.prefill(beginning + document).reuse
    assert (reuse.prompt_id, reuse.num_exact_tokens) == (similar, 0) and reuse.is_approximate


def test_prefix_shorter_than_a_block_is_not_reused(make, draw):
    engine, cache = make(threshold=1.0)
    kept(engine, cache, draw(7, 1) + draw(20, 2))
    assert cache.prefill(draw(7, 1) + draw(20, 3)).reuse.prompt_id is None


def test_a_similar_prompt_without_counterparts_is_not_reused(make, draw):
    index = SignatureIndex(256, max_placed_distance=0)
    engine, cache = make(threshold=0.5, index=index)
    document = draw(60, 1)
    kept(engine, cache, document)
    reuse = cache.prefill(document[::-1]).reuse
    assert reuse.similarity == 1.0 and reuse.prompt_id is None and not reuse.is_approximate
    assert reuse.computed_by_layer == (60,) * 5


def test_larger_recompute_share_comes_closer_to_full_prefill(make, draw):
    document = draw(60, 1)
    tokens = draw(20, 2) + document[:25] + draw(2, 3) + document[25:]
    distances = []
    for share in (0.0, 0.5, 1.0):
        engine, cache = make(threshold=0, recompute=Recompute(share=share, decay=1))
        kept(engine, cache, document)
        want = engine.prefill(tokens)
        got, reuse, _ = cache.prefill(tokens)
        assert reuse.is_approximate == (share < 1)
        sides = [logits_after(engine, tokens, [*d.block_ids, 0], 5) for d in (got, want)]
        distances.append(float((sides[0] - sides[1]).norm()))
    assert distances[0] > distances[1] > 100 * distances[2]


@pytest.mark.parametrize("options", [{"threshold": 1.0}, {"min_tokens": 100}])
def test_dissimilar_or_short_prompt_is_prefilled_plainly(make, draw, options):
    engine, cache = make(**options)
    kept(engine, cache, draw(60, 1))
    tokens = draw(3, 2) + draw(60, 1)
    done, reuse, _ = cache.prefill(tokens, PARAMS)
    assert reuse.prompt_id is None and reuse.computed_by_layer == (63,) * 5
    assert not reuse.is_approximate and reuse.num_matched_tokens == 0
    assert (reuse.similarity > 0.8) == ("threshold" in options)
    assert done.first_token == engine.prefill(tokens, PARAMS).first_token


def test_decode_continues_after_an_approximate_prefill(make, draw):
    tokens = draw(45, 1)
    engine, cache = make(threshold=0, recompute=Recompute(share=1, decay=1))
    kept(engine, cache, draw(5, 2) + draw(45, 1))
    [want] = engine.generate([tokens], PARAMS)
    done, reuse, _ = cache.prefill(tokens, PARAMS)
    assert reuse.prompt_id is not None
    engine.add_prefilled(tokens, done.first_token, done.block_ids, PARAMS)
    got = []
    while engine.has_work:
        got += [output.token_id for output in engine.step()]
    assert got == want.token_ids
    assert engine.allocator.num_free == engine.cache.num_blocks


def test_draws_are_repeatable_by_their_seed(make, draw):
    params = SamplingParams(temperature=1.0, seed=11)
    engine, cache = make(threshold=0, recompute=Recompute(share=1, decay=1))
    kept(engine, cache, draw(5, 2) + draw(45, 1))
    firsts = {cache.prefill(draw(45, 1), params).prefilled.first_token for _ in range(3)}
    assert firsts == {engine.prefill(draw(45, 1), params).first_token}


def test_approximations_are_kept_only_on_request(make, draw):
    document = draw(60, 1)
    tokens = document[:20] + draw(3, 2) + document[20:]
    engine, cache = make(threshold=0.5)
    kept(engine, cache, document)
    assert cache.prefill(tokens, keep="exact").prompt_id is None and len(cache) == 1
    prompt_id = cache.prefill(tokens, keep="any").prompt_id
    assert prompt_id in cache and len(cache) == 2
    _, reuse, _ = cache.prefill(tokens)
    assert reuse.prompt_id == prompt_id
    assert reuse.num_exact_tokens == 20, "of what was kept, only these are exact"
    whole = engine.prefill(tokens)
    exact_id = cache.keep(tokens, whole.block_ids)
    assert exact_id != prompt_id and prompt_id not in cache and len(cache) == 2
    assert cache.prefill(tokens).reuse.num_exact_tokens == 62


def test_keeping_a_prompt_again_only_refreshes_it(make, draw):
    engine, cache = make(num_blocks=12)
    first = kept(engine, cache, draw(45, 1))
    second = kept(engine, cache, draw(45, 2))
    assert cache.num_free == 0
    whole = engine.prefill(draw(45, 1))
    assert cache.keep(draw(45, 1), whole.block_ids) == first and len(cache) == 2
    third = cache.keep(draw(45, 1)[:40], whole.block_ids)
    assert [i in cache for i in (first, second, third)] == [True, False, True]


def test_least_recently_used_prompts_are_evicted_for_room(make, draw):
    engine, cache = make(num_blocks=12)
    ids = [kept(engine, cache, draw(24, seed)) for seed in range(4)]
    assert cache.num_free == 0
    assert cache.prefill(draw(24, 0)).reuse.prompt_id == ids[0]  # which uses it
    new = kept(engine, cache, draw(40, 9))
    assert [i in cache for i in (*ids, new)] == [True, False, False, True, True]
    assert cache.num_free == 1 and len(cache) == 3
    reuse = cache.prefill(draw(24, 1)).reuse
    assert reuse.prompt_id is None, "what was evicted is not found"


def test_forgotten_prompt_is_not_found(make, draw):
    engine, cache = make()
    prompt_id = kept(engine, cache, draw(45, 1))
    cache.forget(prompt_id)
    assert prompt_id not in cache and len(cache) == 0 and cache.num_free == 24
    assert cache.prefill(draw(45, 1)).reuse.prompt_id is None
    with pytest.raises(ValueError, match="forget: prompt_id must be of a kept prompt, got 0"):
        cache.forget(prompt_id)
    assert kept(engine, cache, draw(45, 1)) != prompt_id, "ids are not used again"


def test_retained_prompts_outlive_the_engines_blocks(make, draw):
    engine, cache = make()
    tokens = draw(45, 1)
    prompt_id = kept(engine, cache, tokens)
    for tensor in engine.cache.tensors:
        tensor.fill_(float("nan"))
    done, reuse, _ = cache.prefill(tokens)
    assert reuse.prompt_id == prompt_id
    assert done.first_token == engine.prefill(tokens).first_token


@pytest.mark.parametrize("axes", ["layer kv block token head dim", "block layer kv head token dim"])
def test_any_cache_layout_works(make, deep_engine, draw, axes):
    document, tokens = draw(60, 1), draw(7, 2) + draw(60, 1)
    firsts = []
    for engine in (deep_engine(), deep_engine(axes=axes)):
        engine, cache = make(engine=engine, threshold=0.5)
        kept(engine, cache, document)
        done, reuse, _ = cache.prefill(tokens)
        firsts.append((done.first_token, reuse.computed_by_layer))
    assert firsts[0] == firsts[1]


def test_without_free_blocks_nothing_is_allocated(make, deep_engine, draw):
    engine, cache = make(engine=deep_engine(num_blocks=8))
    prompt_id = kept(engine, cache, draw(45, 1))
    held = engine.allocator.allocate(4)
    for tokens in (draw(45, 1), draw(45, 2)):  # one to reuse, one whole
        with pytest.raises(OutOfBlocks):
            cache.prefill(tokens, keep="exact")
        assert engine.allocator.num_free == 4 and len(cache) == 1
    engine.allocator.free(held)
    assert cache.prefill(draw(45, 1)).reuse.prompt_id == prompt_id


@pytest.mark.parametrize("place", ["rearrange", "save"])
def test_failed_prefill_allocates_nothing(make, draw, monkeypatch, place):
    engine, cache = make()
    kept(engine, cache, draw(45, 1))

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"mooncake_serving.engine.retained_blocks.RetainedBlocks.{place}", fail)
    tokens = draw(45, 1) if place == "rearrange" else draw(45, 2)
    with pytest.raises(KeyboardInterrupt):
        cache.prefill(tokens, keep="exact")
    assert engine.allocator.num_free == engine.cache.num_blocks
    monkeypatch.undo()
    assert cache.prefill(draw(45, 1)).reuse.prompt_id == 0
    assert len(cache) == 1 and cache.num_free == 24 - 6


def test_blocks_of_a_running_request_are_not_kept(make, deep_engine, draw):
    engine, cache = make(engine=deep_engine(chunk_tokens=16))
    engine.add_request(draw(60, 1), PARAMS)
    engine.step()
    [request] = engine.scheduler.running
    assert request.num_computed < 60
    with pytest.raises(
        ValueError, match=r"keep: block_ids\[0\] must be an allocated block that no"
    ):
        cache.keep(draw(60, 1), request.block_ids)
    assert len(cache) == 0 and cache.num_free == 24


@pytest.mark.parametrize("num_blocks", [24, 16])  # both versions fit; the old one makes room
@pytest.mark.parametrize(
    "place", ["retained_blocks.RetainedBlocks.save", "retained_prompts.SignatureIndex.add"]
)
def test_failed_keep_frees_its_blocks(make, draw, monkeypatch, place, num_blocks):
    document = draw(60, 1)
    tokens = document[:20] + draw(3, 2) + document[20:]
    engine, cache = make(num_blocks, threshold=0.5)
    document_id = kept(engine, cache, document)
    prompt_id = cache.prefill(tokens, keep="any").prompt_id
    assert cache.num_free == num_blocks - 16

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"mooncake_serving.engine.{place}", fail)
    with pytest.raises(KeyboardInterrupt):
        cache.keep(tokens, engine.prefill(tokens).block_ids)
    monkeypatch.undo()
    assert document_id in cache
    assert (prompt_id in cache) == (num_blocks == 24), "kept until the new version is"
    assert cache.num_free == num_blocks - 8 * len(cache)
    cache.keep(tokens, engine.prefill(tokens).block_ids)
    assert len(cache) == 2 and document_id in cache and prompt_id not in cache
    assert cache.prefill(tokens).reuse.num_exact_tokens == 62


def test_index_belongs_to_one_cache(make):
    index = SignatureIndex(256)
    engine, _ = make(index=index)
    with pytest.raises(ValueError, match="SemanticCache: index must be of no other cache, got"):
        make(engine=engine, index=index)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_blocks": 0}, "num_blocks must be positive, got 0"),
        ({"threshold": 1.5}, r"threshold must be in \[0, 1\], got 1.5"),
        ({"threshold": True}, "threshold must be a number, got True"),
        ({"min_tokens": -1}, "min_tokens must be at least 0, got -1"),
        ({"recompute": 0.4}, "recompute must be a Recompute, got 0.4"),
        ({"signer": Signer(16)}, "signer must be of 64 dims, got 16"),
        ({"engine": "x"}, "engine must be an Engine, got 'x'"),
        ({"signer": "x"}, "signer must be a Signer, got 'x'"),
        ({"signer": Signer(64, device="meta")}, "signer must be on cpu, got 'meta'"),
        ({"index": "x"}, "index must be a SignatureIndex, got 'x'"),
        ({"index": SignatureIndex(64)}, "index must be empty and of 256 bits, got '0 of 64'"),
    ],
)
def test_bad_arguments_are_rejected(make, changes, message):
    with pytest.raises(ValueError, match=f"SemanticCache: {message}"):
        make(**changes)


def test_bad_calls_change_nothing(make, draw):
    engine, cache = make(num_blocks=4)
    done = engine.prefill(draw(45, 1))
    small = draw(20, 1)
    for call, message in [
        (lambda: cache.prefill([]), "prefill: prompt_tokens must not be empty"),
        (lambda: cache.prefill(small, 3), "prefill: params must be SamplingParams, got 3"),
        (lambda: cache.prefill(small, keep="yes"), "prefill: keep must be 'no', 'exact' or 'any'"),
        (lambda: cache.prefill(draw(33, 1), keep="any"), "must be of at most 4 blocks"),
        (lambda: cache.keep(draw(33, 1), done.block_ids), "keep: prompt_tokens must be of at most"),
        (lambda: cache.keep(small, done.block_ids[:2]), "must be at least 3 different blocks"),
        (lambda: cache.keep(small, done.block_ids[:1] * 3), "must be at least 3 different blocks"),
        (
            lambda: cache.keep(small, [60, 61, 0]),
            r"keep: block_ids\[0\] must be an allocated block",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert len(cache) == 0 and cache.num_free == 4
    assert engine.allocator.num_free == engine.cache.num_blocks - 6
    assert cache.num_bytes == 4 * engine.cache.num_bytes // engine.cache.num_blocks


def test_approximate_blocks_are_no_prefix_for_others(make, deep_engine, draw):
    document, begun = draw(60, 1), draw(16, 3)
    engine, cache = make(engine=deep_engine(keep_prefixes=True), threshold=0.1)
    kept(engine, cache, document)
    tokens = begun + draw(7, 2) + document
    done, reuse, _ = cache.prefill(tokens)
    assert reuse.is_approximate
    engine.add_prefilled(tokens, done.first_token, done.block_ids, PARAMS)
    while engine.has_work:
        engine.step()
    blocks, num_cached = engine.reserve_for(tokens)
    assert num_cached == 0
    engine.release(blocks)
    assert engine.allocator.num_free == engine.allocator.num_blocks
    engine.generate([tokens], PARAMS)  # exact, in blocks that were approximate
    assert engine.reserve_for(tokens)[1] == (len(tokens) - 1) // 8 * 8


def test_blocks_of_a_caller_are_filled_behind_its_own_prefix(make, draw):
    document, begun = draw(60, 1), draw(16, 3)
    engine, cache = make(threshold=0.1)
    kept(engine, cache, document)
    tokens = begun + draw(7, 2) + document
    blocks = engine.reserve(len(tokens))
    assert engine.prefill(begun + tokens[16:17], block_ids=blocks).num_tokens == 17
    before = [part[blocks[:2]].clone() for part in engine.cache.layer(4)]
    filled = cache.fill(tokens, blocks, 16)
    assert filled.num_exact_tokens == 16 and filled.num_matched_tokens > 50
    for was, now in zip(before, engine.cache.layer(4), strict=True):
        assert torch.equal(was, now[blocks[:2]])
    done, computed = engine.prefill_selected(
        tokens, block_ids=blocks, is_reused=filled.is_reused, num_cached_tokens=16
    )
    assert computed[0] == len(tokens) - 16 and computed[-1] < 40 and done.num_cached_tokens == 16
    with pytest.raises(ValueError, match="num_cached_tokens must be whole blocks of 8"):
        cache.fill(tokens, blocks, 15)
    assert cache.fill(document, blocks, 56) == (59, None)  # the last token is left to compute
