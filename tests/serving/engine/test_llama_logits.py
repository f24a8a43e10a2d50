"""Logits agree with transformers, and with themselves however the work is cut."""

import itertools

import pytest
import torch

from mooncake_serving.engine import Batch, Chunk, LayerHooks, Llama, PagedKVCache, load_model
from mooncake_serving.engine.attention import PagedAttention, SdpaAttention

LAYOUTS = ["kv block token head dim", "block layer kv head token dim"]


def logits_of(model, tokens, *, cuts=(), axes=LAYOUTS[0], block_size=8, poison=False):
    """Run a prompt in chunks that end at ``cuts``; return the logits of all its tokens."""
    num_blocks = -(-len(tokens) // block_size) + 2
    cache = PagedKVCache(
        model.config, num_blocks, block_size=block_size, axes=axes, dtype=model.dtype
    )
    if poison:
        for tensor in cache.tensors:
            tensor.fill_(float("nan"))
    block_ids = list(range(num_blocks))[::-1]
    out = []
    for start, stop in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        batch = Batch.build([Chunk(tokens[start:stop], start, block_ids)], block_size)
        out.append(model.forward(batch, cache, all_logits=True))
    return torch.cat(out)


def transformers_logits(folder, tokens):
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0]


def worst(a, b):
    return float((a - b).abs().max())


# Settings of rope that change something within 71 tokens.
ROPES = {
    "plain": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "llama3": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.parametrize("rope", ROPES)
def test_logits_match_transformers(folder_writer, prompts, rope):
    folder = folder_writer(config=ROPES[rope])
    want = transformers_logits(folder, prompts[-1])
    assert worst(logits_of(load_model(folder)[0], prompts[-1]), want) < 2e-5


def test_head_dim_may_be_smaller_than_hidden_size_over_heads(folder_writer, state, prompts):
    for name in [n for n in state if "_proj" in n and "self_attn" in n]:
        rows_are_heads = "o_proj" not in name
        weight = state[name] if rows_are_heads else state[name].T
        weight = weight.reshape(-1, 16, 64)[:, :8].reshape(-1, 64)
        state[name] = (weight if rows_are_heads else weight.T).contiguous()
    folder = folder_writer(config={"head_dim": 8}, state=state)
    want = transformers_logits(folder, prompts[-1])
    assert worst(logits_of(load_model(folder)[0], prompts[-1]), want) < 2e-5


@pytest.mark.parametrize("cuts", [(1,), (8,), (70,), (16, 32, 48, 64), (5, 6, 7, 40)])
def test_chunked_prefill_gives_the_same_logits(tiny, prompts, cuts):
    whole = logits_of(tiny, prompts[-1])
    assert worst(logits_of(tiny, prompts[-1], cuts=cuts), whole) < 2e-5


@pytest.mark.parametrize("block_size", [1, 3, 16, 128])
def test_block_size_and_layout_change_no_bit(tiny, prompts, block_size):
    want = logits_of(tiny, prompts[-1], cuts=(20,))
    for axes in LAYOUTS:
        got = logits_of(tiny, prompts[-1], cuts=(20,), axes=axes, block_size=block_size)
        assert torch.equal(got, want)


def test_contents_of_unwritten_slots_do_not_matter(tiny, prompts):
    want = logits_of(tiny, prompts[-1], cuts=(20, 70))
    assert torch.equal(logits_of(tiny, prompts[-1], cuts=(20, 70), poison=True), want)


def mixed_batch(prompts, axes_model):
    """Two prompts whole, one in its second chunk, two decoding: (batch, cache, chunks)."""
    cache = PagedKVCache(axes_model.config, 64, block_size=8)
    free = iter(range(64))
    tables = [[next(free) for _ in range(10)] for _ in prompts]
    done = [0, 0, 5, len(prompts[3]) - 1, len(prompts[4]) - 1]
    for prompt, table, count in zip(prompts, tables, done, strict=True):
        if count:
            axes_model.forward(Batch.build([Chunk(prompt[:count], 0, table)], 8), cache)
    chunks = [
        Chunk(prompt[count:], count, table)
        for prompt, table, count in zip(prompts, tables, done, strict=True)
    ]
    return Batch.build(chunks, 8), cache, chunks


def test_mixed_batch_gives_the_logits_of_each_request_alone(tiny, prompts):
    batch, cache, _ = mixed_batch(prompts, tiny)
    together = tiny.forward(batch, cache)
    for row, prompt in zip(together, prompts, strict=True):
        assert worst(row, logits_of(tiny, prompt)[-1]) < 2e-5
    assert worst(tiny.forward(batch, cache, requests=[3, 0]), together[[3, 0]]) < 2e-5
    assert tiny.forward(batch, cache, requests=[]).shape == (0, tiny.config.vocab_size)


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="promised for MKL only")
def test_batch_invariant_logits_are_bitwise_equal(tiny, prompts):
    model = Llama(tiny.config, tiny.weights, batch_invariant=True)
    batch, cache, chunks = mixed_batch(prompts, model)
    together = model.forward(batch, cache)
    for index, chunk in enumerate(chunks):
        alone = model.forward(Batch.build([chunk], 8), cache)
        assert torch.equal(alone[0], together[index])


def test_torch_attention_matches_with_nan_in_unwritten_slots():
    """What runs on GPUs, tried on the CPU, with NaN in every slot that was not written."""
    generator = torch.Generator().manual_seed(3)
    kv_lens, block_size = [1, 7, 8, 9, 30, 33, 64], 8
    k, v = (torch.full((60, 8, 2, 16), float("nan")) for _ in range(2))
    chunks, next_block = [], 0
    for kv_len in kv_lens:
        table = list(range(next_block, next_block + -(-kv_len // block_size)))
        next_block = table[-1] + 1
        for cache in (k, v):
            rows = torch.randn(kv_len, 2, 16, generator=generator)
            for position, row in enumerate(rows):
                cache[table[position // block_size], position % block_size] = row
        chunks.append(Chunk([1], kv_len - 1, table))
    chunks.insert(2, Chunk([1, 1, 1], 6, chunks[-1].block_ids))  # a prefill chunk among them
    batch = Batch.build(chunks, block_size)
    q = torch.randn(10, 4, 16, generator=generator)
    ours, torchs = (kind(batch).attend(q, k, v) for kind in (PagedAttention, SdpaAttention))
    assert ours.isfinite().all()
    assert worst(ours, torchs) < 1e-6
    mine, its = ((k.clone(), v.clone()) for _ in range(2))
    new = torch.randn(2, 10, 2, 16, generator=generator)
    PagedAttention(batch).append(*new, *mine)
    SdpaAttention(batch).append(*new, *its)
    for one, other, before in zip(mine, its, (k, v), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        assert not torch.allclose(one, before, equal_nan=True)


@pytest.mark.parametrize("cuts", [(1,), (8,), (70,), (5, 6, 7, 40)])
def test_chunked_attention_is_bitwise_equal(cuts):
    generator = torch.Generator().manual_seed(5)
    k, v = torch.randn(2, 10, 8, 2, 16, generator=generator)
    q = torch.randn(71, 4, 16, generator=generator)
    table = [3, 1, 0, 9, 7, 8, 2, 5, 6]

    def attended(start, stop):
        batch = Batch.build([Chunk([0] * (stop - start), start, table)], 8)
        return PagedAttention(batch).attend(q[start:stop], k, v)

    ends = [0, *cuts, 71]
    chunks = [attended(start, stop) for start, stop in itertools.pairwise(ends)]
    assert torch.equal(torch.cat(chunks), attended(0, 71))


@pytest.mark.parametrize(
    ("kind", "dtype", "most"),
    [(PagedAttention, torch.float32, 1e-6), (SdpaAttention, torch.float64, 1e-12)],
)
def test_attention_equals_its_definition(kind, dtype, most):
    generator = torch.Generator().manual_seed(4)
    k, v = torch.randn(2, 4, 8, 2, 16, generator=generator, dtype=dtype)
    q = torch.randn(5, 4, 16, generator=generator, dtype=dtype)
    table, start = [3, 1, 0], 14
    batch = Batch.build([Chunk([0] * 5, start, table)], 8)
    got = kind(batch).attend(q, k, v)
    q, k, v = q.double(), k.double(), v.double()
    keys, values = (x[table].reshape(-1, 2, 16) for x in (k, v))
    for i in range(5):
        for head in range(4):
            visible = keys[: start + i + 1, head // 2]
            weights = (visible @ q[i, head] / 16**0.5).softmax(0)
            want = weights @ values[: start + i + 1, head // 2]
            assert worst(got[i, head], want) < most


def test_hooks_see_every_layer_in_order(tiny, prompts):
    seen = []
    hooks = LayerHooks(
        before_attention=lambda layer: seen.append(("before", layer)),
        after_write=lambda layer: seen.append(("after", layer)),
    )
    cache = PagedKVCache(tiny.config, 4, block_size=8)
    batch = Batch.build([Chunk(prompts[1], 0, [0])], 8)
    tiny.forward(batch, cache, hooks=hooks)
    assert seen == [("before", 0), ("after", 0), ("before", 1), ("after", 1)]


def test_only_slots_of_the_batch_are_written(tiny, prompts):
    cache = PagedKVCache(tiny.config, 4, block_size=8)
    for tensor in cache.tensors:
        tensor.fill_(99.0)
    tiny.forward(Batch.build([Chunk(prompts[2], 0, [2, 0])], 8), cache)  # 13 tokens
    for k_or_v in cache.layer(0) + cache.layer(1):
        untouched = (k_or_v == 99.0).all(dim=-1).all(dim=-1)
        assert untouched[[1, 3]].all()
        assert not untouched[2].any()
        assert untouched[0].tolist() == [False] * 5 + [True] * 3


def test_bfloat16_logits_are_close(tiny_folder, tiny, prompts):
    model, _ = load_model(tiny_folder, dtype=torch.bfloat16)
    got = logits_of(model, prompts[-1], cuts=(30,)).float()
    assert worst(got, logits_of(tiny, prompts[-1])) < 0.5


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "chunks must not be empty"),
        ([Chunk([], 0, [0])], r"chunks\[0\].token_ids must not be empty"),
        ([Chunk([1], 0, [0]), Chunk([1], -1, [1])], r"chunks\[1\].start must be >= 0, got -1"),
        ([Chunk([1], 8, [0])], r"block_ids must hold 9 tokens, got 1 blocks of 8"),
    ],
)
def test_bad_chunk_is_rejected(chunks, message):
    with pytest.raises(ValueError, match=message):
        Batch.build(chunks, 8)
