"""The engine, alone and in two servers, with the model on a GPU."""

from contextlib import ExitStack

import pytest
import torch

from mooncake_serving.engine import (
    Batch,
    Chunk,
    Engine,
    PagedKVCache,
    SamplingParams,
    load_model,
)
from tests.serving.serve.support import EngineServer

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def logits_of(model, tokens, cuts):
    """Logits of all tokens of a prompt, prefilled in chunks that end at ``cuts``."""
    cache = PagedKVCache(model.config, 16, block_size=16, dtype=model.dtype, device=model.device)
    out = []
    for start, stop in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
        chunk = Chunk(tokens[start:stop], start, list(range(16))[::-1])
        batch = Batch.build([chunk], 16, model.device)
        out.append(model.forward(batch, cache, all_logits=True))
    return torch.cat(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cuts", [(), (5, 6, 40)], ids=str)
def test_gpu_logits_match_the_cpu(gpu, tiny_folder, prompts, dtype, cuts):
    exact = logits_of(load_model(tiny_folder)[0], prompts[-1], cuts)
    here, there = (
        logits_of(load_model(tiny_folder, dtype=dtype, device=device)[0], prompts[-1], cuts)
        for device in ("cpu", gpu)
    )
    assert there.is_cuda
    rounded, error = (float((x.float().cpu() - exact).abs().max()) for x in (here, there))
    assert error <= 1e-3 + 2 * rounded


def test_batched_tokens_equal_single_request_tokens(gpu, tiny_folder, prompts, make_engine):
    model = load_model(tiny_folder, device=gpu)[0]

    def tokens_of(prompts, **limits):
        cache = PagedKVCache(model.config, 64, block_size=16, device=gpu)
        answers = Engine(model, cache, **limits).generate(prompts, PARAMS)
        return [answer.token_ids for answer in answers]

    alone = [tokens_of([prompt])[0] for prompt in prompts]
    assert tokens_of(prompts, chunk_tokens=7, max_batch_tokens=16) == alone
    assert [a.token_ids for a in make_engine().generate(prompts, PARAMS)] == alone  # on the CPU


def test_tokens_of_engines_that_prefill_and_decode_apart(gpu, tiny_folder, prompts):
    model, tokenizer = load_model(tiny_folder, device=gpu, batch_invariant=True)
    alone = Engine(model, PagedKVCache(model.config, 64, device=gpu))
    expected = [tokenizer.decode(one.token_ids) for one in alone.generate(prompts, PARAMS)]
    with ExitStack() as stack:
        engines = []
        for role in ("prefill", "decode"):
            engines.append(EngineServer(tiny_folder, f"--role={role}", f"--device={gpu}"))
            stack.callback(engines[-1].close)
        for prompt, text in zip(prompts, expected, strict=True):
            asked = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}
            params = engines[0].complete(prompt, **asked).json()["kv_transfer_params"]
            asked = {"max_tokens": 12, "ignore_eos": True, "kv_transfer_params": params}
            answer = engines[1].complete(prompt, **asked).json()
            assert answer["choices"][0]["text"] == text
