"""The prefill of a prompt by two processes with half of the layers each, and by one with all.

Each process has one thread and one processor. `ours`: an engine whose first stage is in this
process; a step takes as long as 128 tokens at the beginning of the prompt. `alone`: an engine in
this process that computes 128 tokens a step, and `alone512` 512. SmolLM2-135M in float32, random
tokens; a run is from the prompt to its first token. Before it is timed, the three are compared.
"""

import os
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from lib.harness import Case, LeftOut, arguments
from lib.table import report
from mooncake_serving.engine import (
    Engine,
    Llama,
    ModelNotFound,
    PagedKVCache,
    SamplingParams,
    find_model,
    load_model,
)
from mooncake_serving.engine.pipeline import GroupOptions, PipelinedEngine, StageGroup

CHUNK, NUM_BLOCKS = 128, 320
SIZES, QUICK_SIZES = (1024, 2048), (384,)


def pin(pid: int, processor: int) -> None:
    """Have all threads of a process run on one processor."""
    for thread in os.listdir(f"/proc/{pid}/task"):
        os.sched_setaffinity(int(thread), {processor})


def case(num_tokens: int, pipeline: PipelinedEngine, alone: dict[str, Engine]) -> Case:
    draw = random.Random(num_tokens)
    prompt = [draw.randrange(1000, 40000) for _ in range(num_tokens)]
    params = SamplingParams(max_tokens=1)

    def run(engine: Engine) -> list[int]:
        return engine.generate([prompt], params)[0].token_ids

    def check() -> None:
        tokens = {name: run(engine) for name, engine in alone.items()}
        assert {*map(tuple, tokens.values())} == {tuple(run(pipeline))}, tokens

    return Case(
        f"{num_tokens:,} tokens",
        lambda: run(pipeline),
        {name: lambda engine=engine: run(engine) for name, engine in alone.items()},
        check,
        fields={"num_tokens": num_tokens, "num_stages": pipeline.group.options.num_stages},
    )


def all_cases(is_quick: bool) -> Iterator[Case | LeftOut]:
    processors = sorted(os.sched_getaffinity(0))
    try:
        path = find_model()
    except ModelNotFound as error:
        yield LeftOut("pipeline", str(error))
        return
    if len(processors) < 2:
        yield LeftOut("pipeline", "it needs two processors")
        return
    torch.set_num_threads(1)
    model: Llama = load_model(path)[0]
    with StageGroup(model, GroupOptions(str(path), 2, NUM_BLOCKS)) as group:
        pin(os.getpid(), processors[0])
        pin(group.pids[0], processors[1])
        pipeline = PipelinedEngine(group, chunk_tokens=CHUNK)
        alone = {
            name: Engine(model, PagedKVCache(model.config, NUM_BLOCKS), chunk_tokens=chunk)
            for name, chunk in (("alone", CHUNK), ("alone512", 512))
        }
        for num_tokens in QUICK_SIZES if is_quick else SIZES:
            yield case(num_tokens, pipeline, alone)


if __name__ == "__main__":
    options = arguments(__doc__, without=("device",))
    report("pipeline", all_cases(options.quick), options)
