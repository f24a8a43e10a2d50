"""Which kept prompt is found, how similar it is, and which of its tokens stands for which."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncake_serving.semantic import SignatureIndex, Signatures, Signer

BITS = 16


def of(content, placed=None):
    """Signatures from integers of 16 bits."""

    def packed(values):
        return torch.tensor([[v & 255, v >> 8] for v in values], dtype=torch.uint8).view(-1, 2)

    return Signatures(packed(content), packed(content if placed is None else placed))


def test_prompt_matches_itself():
    index = SignatureIndex(BITS)
    index.add(7, of([1, 2, 0xFF00, 2]))
    match = index.find(of([1, 2, 0xFF00, 2]))
    assert (match.prompt_id, match.similarity, match.index.tolist()) == (7, 1.0, [0, 1, 2, 3])


def test_similarity_is_the_mean_content_distance():
    index = SignatureIndex(BITS, max_distance=4)
    index.add(0, of([0x0000, 0xFFFF]))
    # distances 0, 1, 3 and 4 of the nearest: mean 2
    assert index.find(of([0x0000, 0x0001, 0xFF1F, 0x000F])).similarity == 0.5
    assert index.find(of([0x00FF] * 3)).similarity == 0.0  # 8 bits each: clipped


def test_token_is_chosen_by_placement_and_rejected_by_content():
    index = SignatureIndex(BITS, max_token_distance=2)
    index.add(0, of(content=[0x0000, 0x0003, 0x0F00], placed=[0x1111, 0x2222, 0x3333]))
    new = of(content=[0x0000, 0x0000, 0x0000], placed=[0x2222, 0x1110, 0x3333])
    assert index.find(new).index.tolist() == [1, 0, -1]


def test_token_in_another_context_has_no_counterpart():
    new = of(content=[0, 0, 0], placed=[0x1111, 0x1110, 0x111E])  # 0, 1 and 4 bits from the kept
    for most, want in [(0, [0, -1, -1]), (1, [0, 0, -1]), (4, [0, 0, 0]), (None, [0, 0, -1])]:
        index = SignatureIndex(BITS, max_placed_distance=most)
        index.add(0, of(content=[0], placed=[0x1111]))
        match = index.find(new)
        assert match.index.tolist() == want and match.similarity == 1.0


def test_moved_paragraph_keeps_its_tokens_but_a_shuffle_does_not():
    generator = torch.Generator().manual_seed(0)
    text = torch.randn(200, 64, generator=generator)
    signer, index = Signer(64), SignatureIndex(256)
    index.add(0, signer.sign(text))
    moved = torch.cat((text[100:], text[:100]))
    lost = (index.find(signer.sign(moved)).index < 0).nonzero()[:, 0].tolist()
    assert set(lost) <= {0, 1, 2, 3, 100, 101, 102, 103}, "only behind the seams"
    shuffled = text[torch.randperm(200, generator=generator)]
    match = index.find(signer.sign(shuffled))
    assert match.similarity == 1.0 and int((match.index >= 0).sum()) <= 20


def test_most_similar_prompt_wins_and_ties_go_to_the_last_used():
    index = SignatureIndex(BITS, max_distance=8)
    assert index.find(of([1])) is None
    for prompt_id, content in enumerate(([0xFFFF], [0x0003], [0x000C])):
        index.add(prompt_id, of(content))
    assert index.find(of([0x0000])).prompt_id == 2
    index.touch(1)
    assert index.find(of([0x0000])).prompt_id == 1
    assert index.find(of([0x0000])).prompt_id == 1, "a search uses nothing"
    index.remove(1)
    index.remove(2)
    assert index.find(of([0x0000])).prompt_id == 0


def test_least_recently_used_order():
    index = SignatureIndex(BITS)
    assert index.oldest is None and len(index) == 0
    for prompt_id in range(3):
        index.add(prompt_id, of([prompt_id]))
    assert index.oldest == 0 and len(index) == 3
    index.touch(0)
    assert index.oldest == 1
    index.remove(1)
    assert index.oldest == 2 and 1 not in index and 0 in index


@given(
    prompts=st.lists(st.lists(st.integers(0, 2**BITS - 1), min_size=1, max_size=6), max_size=6),
    new=st.lists(st.integers(0, 2**BITS - 1), min_size=1, max_size=6),
    most=st.integers(0, BITS),
)
def test_search_matches_the_loop(prompts, new, most):
    index = SignatureIndex(
        BITS, max_distance=12, max_token_distance=most, max_placed_distance=BITS, num_compared=8
    )
    for prompt_id, prompt in enumerate(prompts):
        index.add(prompt_id, of(prompt))
    means = [
        sum(min((a ^ b).bit_count() for b in prompt) for a in new) / len(new) for prompt in prompts
    ]
    got = index.find(of(new))
    if not prompts:
        assert got is None
        return
    best = min(reversed(range(len(prompts))), key=means.__getitem__)
    assert got.prompt_id == best
    assert got.similarity == pytest.approx(max(1 - means[best] / 12, 0), abs=1e-12)
    for i, j in enumerate(got.index.tolist()):
        nearest = min((new[i] ^ b).bit_count() for b in prompts[best])
        if nearest > most:
            assert j == -1
        else:
            assert (new[i] ^ prompts[best][j]).bit_count() == nearest


def test_sampled_search_finds_the_prompt_among_many():
    generator = torch.Generator().manual_seed(0)

    def random(num_tokens):
        both = torch.randint(256, (2, num_tokens, 32), generator=generator, dtype=torch.uint8)
        return Signatures(*both)

    index = SignatureIndex(256, num_sampled=16, num_compared=2)
    prompts = [random(100) for _ in range(40)]
    for prompt_id, prompt in enumerate(prompts):
        index.add(prompt_id, prompt)
    for prompt_id in (0, 17, 39):
        changed = Signatures(*(part.clone() for part in prompts[prompt_id]))
        changed.content[::7, 0] ^= 1
        match = index.find(changed)
        assert match.prompt_id == prompt_id
        assert match.similarity == pytest.approx(1 - 15 / 100 / 30, abs=1e-6)
        assert match.index.tolist() == list(range(100))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bits": 7}, "bits must be at least 8, got 7"),
        ({"max_distance": 0}, "max_distance must be in"),
        ({"max_token_distance": -1}, "max_token_distance must be at least 0, got -1"),
        ({"max_placed_distance": -1}, "max_placed_distance must be at least 0, got -1"),
        ({"num_sampled": 0}, "num_sampled must be at least 1, got 0"),
        ({"num_compared": 0.5}, "num_compared must be an integer, got 0.5"),
    ],
)
def test_bad_arguments_are_rejected(changes, message):
    with pytest.raises(ValueError, match=f"SignatureIndex: {message}"):
        SignatureIndex(**({"bits": BITS} | changes))


def test_bad_calls_change_nothing():
    index = SignatureIndex(BITS)
    index.add(0, of([1]))
    for call, message in [
        (lambda: index.add(0, of([2])), "add: prompt_id must be of no kept prompt, got 0"),
        (lambda: index.add(1, of([])), "add: signatures must be of at least one token"),
        (lambda: index.remove(5), "remove: prompt_id must be of a kept prompt, got 5"),
        (lambda: index.touch(5), "touch: prompt_id must be of a kept prompt, got 5"),
        (lambda: index.match(of([1]), 5), "match: prompt_id must be of a kept prompt, got 5"),
        (lambda: index.find(None), "find: signatures must be Signatures, got None"),
        (lambda: index.add(1, "x"), "add: signatures must be Signatures, got 'x'"),
        (lambda: index.find(Signatures(1, 2)), "find: signatures must be two uint8"),
        (lambda: index.find(of([])), "find: signatures must be of at least one token"),
        (
            lambda: index.find(Signatures(*(torch.zeros(1, 4, dtype=torch.uint8),) * 2)),
            "find: signatures must be two uint8",
        ),
        (lambda: index.find(Signatures(of([1]).content, of([1, 2]).placed)), "must be two uint8"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()
    assert len(index) == 1 and index.find(of([1])).similarity == 1.0
