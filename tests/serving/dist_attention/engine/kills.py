"""For tests that kill instances at random moments: jobs, what they answer, and rounds."""

import multiprocessing
import os
import random
import sys
from collections import Counter
from collections.abc import Callable

from mooncake_serving.dist_attention.engine import Job
from mooncake_serving.engine import Engine, PagedKVCache, SamplingParams, load_model
from tests.transfer.resources import assert_no_growth, held, settled
from tests.transfer.support import eventually

WAIT_S = 120.0  # longer than anything here takes
PARAMS = (
    SamplingParams(max_tokens=60, ignore_eos=True),
    SamplingParams(max_tokens=60, temperature=0.8, seed=3, ignore_eos=True),
)


def make_jobs(*lengths: int) -> list[Job]:
    """Random prompts of these lengths, each once by either kind of sampling."""
    chance = random.Random(2)
    return [
        Job([chance.randrange(3, 200) for _ in range(length)], params)
        for length in lengths
        for params in PARAMS
    ]


def answers_of_one_process(folder, jobs: list[Job]) -> list[list[int]]:
    """The tokens of jobs, by a single process with enough memory."""
    model, _ = load_model(folder, batch_invariant=True)
    engine = Engine(model, PagedKVCache(model.config, 256, block_size=8), chunk_tokens=32)
    return [engine.generate([job.prompt_tokens], job.params)[0].token_ids for job in jobs]


def run_and_kill(
    cluster, jobs: list[Job], answers: list[list[int]], at: int = -1, kill=lambda: None
) -> None:
    """Run jobs, and append their tokens to ``answers``; kill after ``at`` of all tokens."""
    if at == 0:
        kill()
    for count, token in enumerate(cluster.run(jobs), start=1):
        answers[token.request_id].append(token.token_id)
        if count == at:
            kill()


def shared_memory() -> set[str]:
    """Names of what torch and multiprocessing share, in whichever program; our own has no names."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("torch_", "sem."))}


def do_rounds(number: int, warm_up: int, one_round: Callable[[int], Counter[str]]) -> None:
    """Do rounds by their seeds; what they hold must not grow after those that warm up.

    No process and no shared memory may be left behind. A failed round is identified by its seed,
    which is written.
    """
    seed = int.from_bytes(os.urandom(4), "little")
    shared, children = shared_memory(), multiprocessing.active_children()
    counts: Counter[str] = Counter()
    for index in range(warm_up + number):
        if index == warm_up:
            before = held()
        sys.stdout.write(f"seed {seed + index}\n")
        counts += one_round(seed + index)
    assert settled(before)
    after = held()
    sys.stdout.write(f"{dict(counts)}\nafter {warm_up} rounds: {before}\nafter all: {after}\n")
    assert_no_growth(before, after)
    assert multiprocessing.active_children() == children
    eventually(lambda: shared_memory() <= shared)
