"""A demo: prefill in one process, decode in another, and the blocks that move between them.

Chat prompts are prefilled by one process, their KV cache is gathered, sent and scattered into
another, which generates the answers. A third run, in a single process, must give the same tokens.
What happened to the blocks is printed as a table.
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from mooncake_kernels.errors import InvalidArgument

from .demo_view import View
from .engine import (
    Engine,
    PagedKVCache,
    SamplingParams,
    Tokenizer,
    find_model,
    load_model,
)
from .engine.disaggregated import Cluster, Job, WorkerOptions

PROMPTS = (
    "What is the capital of France? Answer in one sentence.",
    "Write two sentences about the moon.",
    "Here is a note from a kitchen. On Monday we baked nine loaves of rye bread and sold seven. "
    "On Tuesday the oven was cold until noon, so we made soup of leeks and potatoes, and forty "
    "people ate it. On Wednesday a baker from the next town came with a sack of spelt flour, and "
    "we tried it in rolls, in a flat bread with onions and in a cake with plums. The rolls were "
    "dry, the flat bread was good, the cake was gone before it had cooled. On Thursday we wrote "
    "to the baker for three more sacks. On Friday it rained, nobody came, and we cleaned the "
    "shelves, mended the door, sharpened all the knives and counted the jars: twelve of plum, "
    "four of quince, one of something that has lost its label. What did the kitchen try the "
    "spelt flour in?",
)
OnLoading = Callable[[str, int, int], None]


def run(options: argparse.Namespace) -> int:
    """Run the demo; return 0 if the tokens are the same, 1 with one line of error if not."""
    with View(quiet=options.json) as view:
        result = _demo(options, view)
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")
    if not result["identical"]:
        sys.stderr.write("error: the tokens differ from those of a single process\n")
    return 0 if result["identical"] else 1


def _demo(options: argparse.Namespace, view: View) -> dict[str, Any]:
    find_model(options.model)  # fail before any process is started
    _check_device(options.device)
    prompts = options.prompt or list(PROMPTS)
    for prompt in prompts:
        try:
            prompt.encode()
        except UnicodeEncodeError:
            raise InvalidArgument(f"demo: --prompt must be UTF-8 text, got {prompt!r}") from None
    worker = WorkerOptions(
        model=options.model,
        device=options.device,
        transports=(options.transport,),
        chunk_tokens=options.chunk_tokens,
        deadline_s=options.deadline,
        start_s=options.start_deadline,
    )
    params = SamplingParams(
        temperature=options.temperature, seed=options.seed, max_tokens=options.max_tokens
    )
    torch.set_num_threads(worker.threads)
    with Cluster(worker) as cluster:
        engine, tokenizer = _single_process(worker, view.loading)
        jobs = [Job(_encode(tokenizer, prompt), params) for prompt in prompts]
        cluster.wait_until_ready(view.loading)
        answers = _stream(cluster, jobs, prompts, tokenizer, view)
        life = list(cluster.life.rows())
    view.checking()
    expected = engine.generate([job.prompt_tokens for job in jobs], params)
    same = [a == e.token_ids for a, e in zip(answers, expected, strict=True)]
    view.verdict(life, jobs, same, options)
    return {
        "identical": all(same),
        "requests": [
            {
                "prompt": prompt,
                "num_prompt_tokens": len(job.prompt_tokens),
                "token_ids": tokens,
                "text": tokenizer.decode(tokens),
                "identical": ok,
            }
            for prompt, job, tokens, ok in zip(prompts, jobs, answers, same, strict=True)
        ],
        "life": [
            {"step": step.name, "bytes": step.num_bytes, "us": step.seconds * 1e6} for step in life
        ],
    }


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError:
        kind = "unknown"
    if kind not in ("cpu", "cuda"):
        raise InvalidArgument(f"demo: --device must be cpu or cuda, got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise InvalidArgument(
            f"demo: --device must be cpu, for torch finds no GPU here, got {device!r}"
        )


def _single_process(worker: WorkerOptions, on_loading: OnLoading) -> tuple[Engine, Tokenizer]:
    """The engine that the two processes must agree with, and the tokenizer."""
    model, tokenizer = load_model(
        worker.model,
        device=worker.device,
        progress=lambda done, total, _: on_loading("single process", done, total),
        batch_invariant=True,
    )
    cache = PagedKVCache(
        model.config,
        worker.num_blocks,
        block_size=worker.block_size,
        dtype=model.dtype,
        device=worker.device,
    )
    return Engine(model, cache, chunk_tokens=worker.chunk_tokens), tokenizer


def _encode(tokenizer: Tokenizer, prompt: str) -> list[int]:
    if tokenizer.chat_template is None:
        return tokenizer.encode(prompt)  # a base model: it continues the text
    return tokenizer.encode_chat([{"role": "user", "content": prompt}])


def _stream(
    cluster: Cluster, jobs: list[Job], prompts: list[str], tokenizer: Tokenizer, view: View
) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in jobs]
    streams = [tokenizer.stream() for _ in jobs]
    view.begin(prompts)
    for token in cluster.run(jobs):
        answers[token.request_id].append(token.token_id)
        stream = streams[token.request_id]
        rest = stream.finish if token.finish_reason else str
        view.text(token.request_id, stream.push(token.token_id) + rest())
    return answers
