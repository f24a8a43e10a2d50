"""Signatures say what a token is and what it follows."""

import pytest
import torch

from mooncake_serving.semantic import Signer, with_context, with_positions


def embeddings(num_tokens, dim=32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64)


def num_differing(ours, theirs):
    bits = [int.from_bytes(bytes(row), "little") for row in (ours ^ theirs).tolist()]
    return [number.bit_count() for number in bits]


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 40])
@pytest.mark.parametrize("context", [0, 1, 5])
def test_context_matches_the_loop(num_tokens, context):
    tokens = embeddings(num_tokens)
    want = torch.zeros_like(tokens)
    for t in range(num_tokens):
        for back in range(min(context, t) + 1):
            want[t] += 0.6**back * tokens[t - back].roll(back)
    torch.testing.assert_close(with_context(tokens, context, 0.6), want)


def test_positions_match_rope():
    tokens = embeddings(9, dim=6)
    got = with_positions(tokens, 100.0)
    for t in range(9):
        for i in range(3):
            angle = torch.tensor(t * 100.0 ** (-2 * i / 6), dtype=torch.float64)
            pair = torch.complex(tokens[t, i], tokens[t, i + 3]) * torch.exp(1j * angle)
            torch.testing.assert_close(torch.complex(got[t, i], got[t, i + 3]), pair)


def test_moved_text_keeps_its_signatures_except_at_the_seam():
    text, front = embeddings(50).float(), embeddings(20, seed=1).float()
    signer = Signer(32, context_tokens=4)
    alone, behind = signer.sign(text), signer.sign(torch.cat((front, text)))
    assert torch.equal(alone.content, behind.content[20:])
    assert sum(num_differing(alone.placed[4:], behind.placed[24:])) <= 4  # dots that are near 0
    assert min(num_differing(alone.placed[:1], behind.placed[20:21])) > 20


def test_moved_token_is_more_distant_with_rotary_order():
    text, front = embeddings(50).float(), embeddings(20, seed=1).float()
    signer = Signer(32, order="rotary")
    alone, behind = signer.sign(text), signer.sign(torch.cat((front, text)))
    assert torch.equal(alone.content, behind.content[20:])
    assert min(num_differing(alone.placed, behind.placed[20:])) > 20


def test_equal_arguments_make_comparable_signatures():
    text = embeddings(10).float()
    first, same = Signer(32).sign(text), Signer(32).sign(text.bfloat16().float())
    assert first.content.shape == first.placed.shape == (10, 32)
    assert sum(num_differing(first.content, same.content)) < 0.02 * 10 * 256
    other = Signer(32, seed=1).sign(text)
    assert min(num_differing(first.content, other.content)) > 80
    assert Signer(32, bits=64).sign(text).content.shape == (10, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim": 0}, "dim must be at least 1, got 0"),
        ({"dim": 3, "order": "rotary"}, "dim must be even for the order 'rotary', got 3"),
        ({"bits": 12}, "bits must be a multiple of 8, got 12"),
        ({"bits": True}, "bits must be an integer, got True"),
        ({"order": "absolute"}, "order must be 'context' or 'rotary', got 'absolute'"),
        ({"context_tokens": -1}, "context_tokens must be at least 0, got -1"),
        ({"context_decay": 1.5}, r"context_decay must be in \[0, 1\], got 1.5"),
        ({"theta": float("nan")}, "theta must be in"),
        ({"seed": "a"}, "seed must be an integer, got 'a'"),
        ({"seed": 2**70}, "seed must be below 2\\*\\*64, got 1180591620717411303424"),
    ],
)
def test_bad_arguments_are_rejected(changes, message):
    with pytest.raises(ValueError, match=f"Signer: {message}"):
        Signer(**({"dim": 32} | changes))


def test_embeddings_of_another_shape_are_rejected():
    with pytest.raises(ValueError, match=r"embeddings must be \[num_tokens, 32\], got 'x'"):
        Signer(32).sign("x")
    with pytest.raises(ValueError, match=r"embeddings must be \[num_tokens, 32\], got \[4, 16\]"):
        Signer(32).sign(torch.zeros(4, 16))
