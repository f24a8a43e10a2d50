"""The engine, and prefill and decode in two processes, with the model on a GPU."""

import json
import sys

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
from tests.progress import run_to_its_end

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


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_prefill_and_decode_in_two_processes(gpu, tiny_folder, transport):
    words = ["--device", "cuda", "--model", tiny_folder, "--transport", transport, "--json"]
    words += ["--max-tokens", 8, "--prompt", "the end", "--prompt", "one, two, three"]
    command = [sys.executable, "-m", "mooncake_serving", "demo", *map(str, words)]
    done = run_to_its_end(command)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["identical"] is True
    assert all(len(request["token_ids"]) > 0 for request in answer["requests"])
