"""The forward pass that drops rows, against a loop in float64 and against the plain prefill."""

import math
from dataclasses import replace

import pytest
import torch

from mooncake_serving.engine import (
    Batch,
    Chunk,
    Engine,
    Llama,
    NotFinite,
    PagedKVCache,
    SamplingParams,
)
from mooncake_serving.engine.attention import PagedAttention, SdpaAttention, attention_of
from mooncake_serving.engine.retained_blocks import RetainedBlocks
from mooncake_serving.engine.selective_prefill import forward_selected, selected
from mooncake_serving.semantic import Recompute

BLOCK_SIZE = 8


class Loop:
    """The whole of it in float64, token by token and head by head, on lists of plain tensors."""

    def __init__(self, model):
        self.model, self.config = model, model.config
        self.frequencies = model.weights.frequencies.double()

    def norm(self, x, weight):
        return x / (x.pow(2).mean() + self.config.rms_eps).sqrt() * weight.double()

    def rotated(self, heads, position):
        half = self.config.head_dim // 2
        angles = position * self.frequencies
        first, second = heads[:, :half], heads[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=1)

    def qkv(self, layer, x, position):
        config = self.config
        heads = (layer.qkv.double() @ self.norm(x, layer.attention_norm)).view(-1, config.head_dim)
        q, k, v = heads.split([config.num_heads, config.num_kv_heads, config.num_kv_heads])
        return self.rotated(q, position), self.rotated(k, position), v

    def attended(self, q, keys, values):
        group = self.config.num_heads // self.config.num_kv_heads
        out = []
        for head in range(self.config.num_heads):
            scores = torch.stack([k[head // group] @ q[head] for k in keys])
            weights = (scores / math.sqrt(self.config.head_dim)).softmax(0)
            out.append(sum(w * v[head // group] for w, v in zip(weights, values, strict=True)))
        return torch.cat(out)

    def run(self, tokens, keys, values, start, is_reused, recompute):
        """Overwrite keys and values ``[layer][position]``; return logits and counts."""
        weights, num_layers = self.model.weights, self.config.num_layers
        rows = list(range(start, len(tokens)))
        hidden = {p: weights.embedding[tokens[p]].double() for p in rows}
        counts, ranked, always = [], None, None
        for index, layer in enumerate(weights.layers):
            q, fresh = {}, {}
            for p in rows:
                q[p], *fresh[p] = self.qkv(layer, hidden[p], p)
            if index == recompute.full_layers:
                always = [p for p in rows if not is_reused[p - start] or p == len(tokens) - 1]
                deviation = {
                    p: (fresh[p][0] - keys[index][p]).norm()
                    + (fresh[p][1] - values[index][p]).norm()
                    for p in rows
                    if p not in always
                }
                ranked = sorted(deviation, key=lambda p: -deviation[p])
            for p in rows:
                keys[index][p], values[index][p] = fresh[p]
            counts.append(len(rows))
            if ranked is not None:
                count = math.ceil(recompute.share_of(index) * len(ranked))
                rows = sorted(always + ranked[:count])
            for p in rows:
                got = self.attended(q[p], keys[index][: p + 1], values[index][: p + 1])
                x = hidden[p] + layer.attention_out.double() @ got
                gate, up = (layer.gate_up.double() @ self.norm(x, layer.ffn_norm)).chunk(2)
                gated = torch.nn.functional.silu(gate) * up
                hidden[p] = x + layer.down.double() @ gated
        last = self.norm(hidden[len(tokens) - 1], weights.norm)
        assert num_layers == len(counts)
        return weights.head.double() @ last, counts


def whole(model, tokens):
    """Prefill a prompt in one pass; return logits and the cache, whose blocks are reversed."""
    num_blocks = -(-len(tokens) // BLOCK_SIZE)
    cache = PagedKVCache(model.config, num_blocks, block_size=BLOCK_SIZE)
    chunk = Chunk(tokens, 0, list(range(num_blocks))[::-1])
    return model.forward(Batch.build([chunk], BLOCK_SIZE), cache), cache, chunk.block_ids


def rearranged(model, kept, index, num_tokens):
    """A cache with what the kept prompt's tokens at ``index`` leave, and NaN elsewhere."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    first = -(-len(kept) // BLOCK_SIZE)
    cache = PagedKVCache(model.config, first + num_blocks, block_size=BLOCK_SIZE)
    model.forward(batch_of(kept, 0, list(range(first))), cache)
    pool = RetainedBlocks(model, cache, first)
    in_pool = pool.save(list(range(first)))
    for tensor in cache.tensors:
        tensor.fill_(float("nan"))
    block_ids = list(range(first, first + num_blocks))
    pool.rearrange(in_pool, torch.tensor(index), block_ids)
    return cache, block_ids


def by_position(cache, block_ids, num_tokens):
    """Copies of keys and values as float64 lists ``[layer][position]``."""
    parts = []
    for part in (0, 1):
        layers = [cache.layer(i)[part][block_ids].flatten(0, 1) for i in range(cache.num_layers)]
        parts.append([list(layer[:num_tokens].double()) for layer in layers])
    return parts


def stacked(parts):
    return torch.stack([torch.stack([*map(torch.stack, layers)]) for layers in parts])


def batch_of(tokens, start, block_ids):
    return Batch.build([Chunk(tokens[start:], start, block_ids)], BLOCK_SIZE)


def close(got, want):
    torch.testing.assert_close(got.double(), want.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "recompute",
    [
        Recompute(),
        Recompute(share=0),
        Recompute(share=0.7, decay=0.5, floor=0.2),
        Recompute(share=0.3, full_layers=3),
        Recompute(full_layers=9),
    ],
)
def test_selective_prefill_matches_the_loop_in_float64(deep, draw, recompute):
    kept, new = draw(30, 1), draw(20, 2)
    tokens = kept[:6] + new[:3] + kept[10:24] + new[3:5] + kept[20:26]
    index = [*range(6), 28, 2, -1, *range(10, 24), -1, 9, *range(20, 26)]
    cache, block_ids = rearranged(deep, kept, index, len(tokens))
    keys, values = by_position(cache, block_ids, len(tokens))
    is_reused = torch.tensor(index[6:]) >= 0
    want, counts = Loop(deep).run(tokens, keys, values, 6, is_reused, recompute)
    got, num_rows = forward_selected(
        deep, cache, batch_of(tokens, 6, block_ids), is_reused, recompute
    )
    assert list(num_rows) == counts
    close(got[0], want)
    close(stacked(by_position(cache, block_ids, len(tokens))), stacked((keys, values)))


def test_share_of_one_is_bitwise_equal_to_plain_prefill(deep, draw):
    tokens = draw(45, 3)
    want, cache, blocks = whole(deep, tokens)
    new, block_ids = rearranged(deep, draw(45, 4), list(range(45)), 45)
    batch = batch_of(tokens, 0, block_ids)
    is_reused = torch.ones(45, dtype=torch.bool)
    got, num_rows = forward_selected(deep, new, batch, is_reused, Recompute(share=1, decay=1))
    assert num_rows == (45,) * 5
    close(got, want)
    mine, other = by_position(new, block_ids, 45), by_position(cache, blocks, 45)
    assert torch.equal(stacked(mine), stacked(other))


@pytest.mark.parametrize("reuses", [False, True])
def test_reusing_nothing_or_own_keys_and_values_equals_plain_prefill(deep, draw, reuses):
    tokens = draw(45, 3)
    want, *_ = whole(deep, tokens)
    source = (tokens, list(range(45))) if reuses else (draw(45, 4), [-1] * 45)
    cache, block_ids = rearranged(deep, *source, 45)
    is_reused = torch.full((45,), reuses)
    got, num_rows = forward_selected(
        deep, cache, batch_of(tokens, 0, block_ids), is_reused, Recompute(share=0)
    )
    assert num_rows == ((45, 45, 1, 1, 1) if reuses else (45,) * 5)
    close(got, want)


def test_moved_keys_are_rotated_to_their_positions(deep, draw):
    kept = draw(40, 5)
    tokens = draw(11, 6) + kept
    _, fresh, fresh_blocks = whole(deep, tokens)
    cache, block_ids = rearranged(deep, kept, [-1] * 11 + list(range(40)), 51)
    for part in (0, 1):  # layer 0: what depends on a token and its position only
        got = cache.layer(0)[part][block_ids].flatten(0, 1)[11:51]
        want = fresh.layer(0)[part][fresh_blocks].flatten(0, 1)[11:51]
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
        deeper = cache.layer(3)[part][block_ids].flatten(0, 1)[11:51]
        assert not torch.allclose(deeper, fresh.layer(3)[part][fresh_blocks].flatten(0, 1)[11:51])


def test_attention_of_selected_rows_matches_torch(deep, draw):
    """What runs on GPUs, tried on the CPU."""
    generator = torch.Generator().manual_seed(0)
    k, v = torch.randn(2, 6, BLOCK_SIZE, 2, 16, generator=generator)
    full = batch_of(draw(45, 1), 0, [3, 1, 0, 2, 5, 4])
    for rows in ([44], [0, 7, 8, 44], list(range(3, 45)), list(range(45))):
        chosen = selected(full, torch.tensor(rows))
        kernels, torchs = attention_of(chosen, selected=True), SdpaAttention(chosen)
        assert isinstance(kernels, PagedAttention)
        q = torch.randn(len(rows), 4, 16, generator=generator)
        got, want = (a.attend(q, k, v) for a in (kernels, torchs))
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
        mine, its = k.clone(), k.clone()
        new = torch.randn(len(rows), 2, 16, generator=generator)
        kernels.append(new, new, mine, mine.clone())
        torchs.append(new, new, its, its.clone())
        assert torch.equal(mine, its)


def test_engine_continues_as_after_a_plain_prefill(deep_engine, draw):
    params = SamplingParams(max_tokens=6, ignore_eos=True, temperature=1.0, seed=5)
    tokens, engine = draw(45, 3), deep_engine()
    [want] = engine.generate([tokens], params)
    block_ids = engine.reserve(45, params)
    nothing = torch.zeros(45, dtype=torch.bool)
    done, num_rows = engine.prefill_selected(tokens, params, block_ids=block_ids, is_reused=nothing)
    assert (done.num_tokens, done.num_cached_tokens, done.block_ids) == (45, 0, block_ids)
    assert [(c.start, c.stop) for c in done.chunks] == [(0, 45)] and num_rows == (45,) * 5
    engine.add_prefilled(tokens, done.first_token, block_ids, params)
    got = []
    while engine.has_work:
        got += [output.token_id for output in engine.step()]
    assert got == want.token_ids
    assert engine.allocator.num_free == engine.cache.num_blocks


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"is_reused": torch.zeros(44, dtype=torch.bool)}, r"is_reused must be bool \[45\]"),
        ({"is_reused": torch.zeros(45)}, r"is_reused must be bool \[45\]"),
        ({"is_reused": [True] * 45}, r"is_reused must be bool \[45\]"),
        ({"recompute": 0.4}, "recompute must be a Recompute, got 0.4"),
        ({"block_ids": [0]}, r"block_ids must be at least 6 different blocks"),
        ({"block_ids": [60, 61, 62, 63, 0, 1]}, r"block_ids\[0\] must be an allocated block"),
        ({"num_cached_tokens": 45}, "num_cached_tokens must be at least 0 and less than"),
        ({"prompt_tokens": []}, "prompt_tokens must not be empty"),
        ({"params": 3}, "params must be SamplingParams"),
    ],
)
def test_bad_arguments_are_rejected(deep_engine, draw, changes, message):
    engine = deep_engine()
    block_ids = engine.reserve(45)[:6]
    given = {
        "prompt_tokens": draw(45, 1),
        "block_ids": block_ids,
        "is_reused": torch.ones(45, dtype=torch.bool),
    }
    with pytest.raises(ValueError, match=f"prefill_selected: {message}"):
        engine.prefill_selected(**(given | changes))


def test_nonfinite_logits_are_rejected(deep, draw):
    broken = Llama(deep.config, replace(deep.weights, norm=deep.weights.norm * float("nan")))
    engine = Engine(broken, PagedKVCache(deep.config, 8, block_size=BLOCK_SIZE))
    block_ids = engine.reserve(5, SamplingParams(max_tokens=1))
    with pytest.raises(NotFinite, match="prefill_selected"):
        engine.prefill_selected(
            draw(5, 1), block_ids=block_ids, is_reused=torch.ones(5, dtype=torch.bool)
        )
