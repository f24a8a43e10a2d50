"""kill -9 of a worker at random moments: no run hangs, no token is wrong, nothing is left behind.

``--soak`` makes it 100 kills; a failed one is identified by its seed, ``Round.of(seed)``.
"""

import os
import random
import signal
import sys
import threading
from collections import Counter
from dataclasses import dataclass

import pytest

from mooncake_serving.engine.disaggregated import (
    Cluster,
    RequestFailed,
    WorkerFailed,
    WorkerOptions,
)
from tests.serving.kills import WAIT_S, answers_of_one_process, do_rounds, make_jobs, run_and_kill

JOBS = make_jobs(3, 8, 40, 100, 131, 250)
NUM_TOKENS = sum(job.params.max_tokens for job in JOBS)


@dataclass(frozen=True)
class Round:
    """One kill."""

    seed: int
    victim: str
    transport: str
    is_starting: bool  # killed while the models load
    num_tokens: int  # of all requests, that the run has yielded before
    delay_s: float  # after these, or after the process was started

    @staticmethod
    def of(seed: int) -> "Round":
        chance = random.Random(seed)
        is_starting = chance.random() < 0.1
        return Round(
            seed,
            chance.choice(["prefill", "decode"]),
            chance.choice(["tcp", "shm"]),
            is_starting,
            0 if is_starting else max(0, chance.randrange(-NUM_TOKENS // 2, NUM_TOKENS)),
            chance.uniform(0, 4.0 if is_starting else 0.3),
        )


@pytest.fixture(scope="module")
def expected(tiny_folder):
    return answers_of_one_process(tiny_folder, JOBS)


def run(cluster: Cluster, answers: list[list[int]], at: int = -1, kill=lambda: None) -> str:
    """What ended it: "complete", or the error that says that some were not served."""
    try:
        run_and_kill(cluster, JOBS, answers, at, kill)
    except WorkerFailed as error:
        return str(error)
    except RequestFailed:  # the survivor has noticed first
        return "some failed"
    return "complete"


def kill_one(plan: Round, folder, expected) -> str:
    limits = {"num_blocks": 96, "block_size": 8, "num_staging_blocks": 64, "chunk_tokens": 32}
    options = WorkerOptions(str(folder), transports=(plan.transport,), deadline_s=WAIT_S, **limits)
    killed = f"the {plan.victim} process was killed by signal 9"
    answers: list[list[int]] = [[] for _ in JOBS]
    with Cluster(options) as cluster:
        victim = getattr(cluster, plan.victim).process
        survivor = getattr(cluster, "decode" if plan.victim == "prefill" else "prefill").process
        if not plan.is_starting:
            cluster.wait_until_ready()
        timer = threading.Timer(plan.delay_s, os.kill, (victim.pid, signal.SIGKILL))
        end = run(cluster, answers, plan.num_tokens, timer.start)
        timer.join()
        assert end in ("complete", "some failed") or end == killed
        if end == "complete":
            assert answers == expected
        for answer, whole in zip(answers, expected, strict=True):
            assert answer == whole[: len(answer)]
        assert run(cluster, [[] for _ in JOBS]) == killed, "it says what is wrong with it"
    assert victim.exitcode == -signal.SIGKILL
    assert survivor.exitcode in (
        0,
        -signal.SIGKILL,
    )  # by force if it did not end soon, busy loading
    return "a run failed" if end == killed else end


def test_cluster_survives_worker_kills_at_random_moments(tiny_folder, expected, soak):
    def one_round(seed: int) -> Counter[str]:
        plan = Round.of(seed)
        sys.stdout.write(f"{plan}\n")
        end = kill_one(plan, tiny_folder, expected)
        return Counter([f"{plan.victim}, {plan.transport}: {end}"])

    do_rounds(100 if soak else 2, 2, one_round)
