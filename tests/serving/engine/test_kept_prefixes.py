"""Full blocks that are kept for prompts that begin alike."""

import pytest

import mooncake_kernels as mk
from mooncake_serving.engine import OutOfBlocks, SamplingParams
from mooncake_serving.engine.caching_allocator import (
    CachingAllocator,
    DroppedBlocks,
    KeptBlocks,
)

SIZE = 4
TOKENS = list(range(100, 112))  # three blocks


@pytest.fixture
def allocator():
    return CachingAllocator(6, SIZE)


def kept_and_free(allocator: CachingAllocator, tokens: list[int]) -> list[int]:
    """Keep a sequence whose request has ended."""
    blocks: list[int] = []
    assert allocator.allocate_for([*tokens, 0], len(tokens) // SIZE + 1, blocks) == 0
    allocator.keep(tokens, blocks)
    allocator.free(blocks)
    return blocks


def test_prompt_begins_with_kept_blocks_and_leaves_a_token_to_compute(allocator):
    blocks = kept_and_free(allocator, TOKENS)
    assert (allocator.num_kept, allocator.num_free) == (3, 6)
    for length, expected in ((3, 0), (4, 0), (5, 4), (12, 8), (13, 12)):
        mine: list[int] = []
        prompt, num_blocks = [*TOKENS, 7][:length], length // SIZE + 1
        assert allocator.allocate_for(prompt, num_blocks, mine) == expected
        assert mine[: expected // SIZE] == blocks[: expected // SIZE]
        assert len({*mine}) == num_blocks
        allocator.free(mine)
    other: list[int] = []
    assert allocator.allocate_for([*TOKENS[:4], 1, *TOKENS[5:], 7], 4, other) == 4


def test_least_recently_used_ends_are_given_up_first_and_told(allocator):
    changes: list = []
    allocator.on_change = changes.append
    names = mk.block_hashes(TOKENS, SIZE).tolist()
    first = kept_and_free(allocator, TOKENS)
    other = kept_and_free(allocator, [1, 2, 3, 4])
    [name] = mk.block_hashes([1, 2, 3, 4], SIZE).tolist()
    assert changes == [
        KeptBlocks(tuple(names), tuple(first[:3]), None, tuple(TOKENS)),
        KeptBlocks((name,), (other[0],), None, (1, 2, 3, 4)),
    ]
    held = allocator.allocate(3)  # two were free: the last block of the first sequence goes
    assert changes[2:] == [DroppedBlocks((names[2],))]
    mine: list[int] = []
    assert allocator.allocate_for([*TOKENS, 7], 3, mine) == 8
    assert other[0] in mine  # the other sequence had to go for it
    with pytest.raises(OutOfBlocks):
        allocator.allocate(1)
    with pytest.raises(OutOfBlocks):
        allocator.allocate_for([*TOKENS, 7], 4, [])
    allocator.free(held)
    allocator.free(mine)
    assert allocator.num_free == 6 and allocator.num_kept == 2
    allocator.keep(TOKENS[:8], mine[:0] or allocator.allocate(2))  # they are there: nothing is new
    assert allocator.num_kept == 2


def test_equal_hash_of_other_tokens_is_no_hit(allocator, monkeypatch):
    kept_and_free(allocator, TOKENS)
    names = mk.block_hashes(TOKENS, SIZE)
    monkeypatch.setattr(mk, "block_hashes", lambda tokens, size: names[: len(tokens) // size])
    assert allocator.allocate_for([*range(12), 7], 4, []) == 0


@pytest.mark.parametrize("chunk_tokens", [None, 16])
def test_answers_are_equal_and_prefixes_computed_once(make_engine, prompts, chunk_tokens):
    params = SamplingParams(max_tokens=9)
    longest = prompts[-1]
    turns = [*prompts, longest[:50] + prompts[2], [*longest, 5, 6, 7]]
    plain = make_engine(num_blocks=64)
    expected = [plain.generate([prompt], params)[0] for prompt in turns]
    cached: list[int] = []
    engine = make_engine(
        num_blocks=40,
        chunk_tokens=chunk_tokens,
        keep_prefixes=True,
        on_step=lambda work: cached.extend(request.num_cached_tokens for request, _ in work),
    )
    for prompt, answer in zip(turns, expected, strict=True):
        cached.clear()
        [got] = engine.generate([prompt], params)
        assert got == answer
        hits = {71: 0, 63: 48, 74: 64}.get(len(prompt), 0)
        assert {*cached} == {hits}
    assert engine.generate(turns, params) == expected  # together: some run out of blocks and wait
    assert engine.allocator.num_free == 40 and engine.allocator.num_kept > 0


def test_answer_is_kept_for_the_next_turn(make_engine, prompts):
    engine = make_engine(keep_prefixes=True)
    [answer] = engine.generate([prompts[3]], SamplingParams(max_tokens=20, ignore_eos=True))
    blocks, num_cached = engine.reserve_for([*prompts[3], *answer.token_ids, 9])
    assert num_cached == (len(prompts[3]) + 19) // 8 * 8  # the last token was never attended to
    engine.release(blocks)


def test_request_continues_behind_what_is_in_its_blocks(make_engine, prompts):
    params = SamplingParams(max_tokens=7)
    there, here = make_engine(), make_engine()
    [expected] = make_engine().generate([prompts[4]], params)
    done = there.prefill(prompts[4])
    blocks, num_cached = here.reserve_for(prompts[4], params)
    assert num_cached == 0
    packed = mk.gather_blocks(there.cache.view(), done.block_ids)
    mk.scatter_blocks(packed, blocks[: len(done.block_ids)], here.cache.view())
    here.add_request(prompts[4], params, block_ids=blocks, num_cached_tokens=len(prompts[4]) - 1)
    got = []
    while here.has_work:
        got += [output.token_id for output in here.step()]
    assert got == expected.token_ids
    assert here.allocator.num_free == here.cache.num_blocks


def test_aborted_request_frees_what_it_shares(make_engine, prompts):
    engine = make_engine(num_blocks=40, keep_prefixes=True)
    engine.generate([prompts[4]], SamplingParams(max_tokens=2))
    first = engine.add_request([*prompts[4], 1])
    engine.step()
    assert engine.abort(first)
    assert engine.allocator.num_free == 40
