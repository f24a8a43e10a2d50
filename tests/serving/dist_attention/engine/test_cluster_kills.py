"""kill -9 of instances at random moments: the others serve their requests, and have all blocks.

``--soak`` makes it 100 kills; a failed cluster is identified by its seed, ``Round.of(seed)``.
"""

import os
import random
import signal
import sys
import threading
from collections import Counter
from dataclasses import dataclass

import pytest

from mooncake_serving.dist_attention import LoanOptions
from mooncake_serving.dist_attention.engine import (
    DistAttentionCluster,
    InstanceOptions,
    Job,
    RequestFailed,
)
from mooncake_serving.engine import SamplingParams
from tests.waiting import eventually

from .kills import WAIT_S, answers_of_one_process, do_rounds, make_jobs, run_and_kill

NUM_INSTANCES, NUM_BLOCKS, BLOCK_SIZE = 3, 30, 8
JOBS = make_jobs(3, 40, 100, 230, 260)  # the last two borrow
FULL = Job([7] * (NUM_BLOCKS * BLOCK_SIZE - 1), SamplingParams(max_tokens=1))  # all blocks of one


@dataclass(frozen=True)
class Round:
    """A cluster of which all instances but one are killed, each in a run of its own."""

    seed: int
    transport: str
    victims: tuple[int, ...]
    num_tokens: tuple[int, ...]  # of all requests, that the run has yielded before
    delays_s: tuple[float, ...]  # after these

    @staticmethod
    def of(seed: int) -> "Round":
        chance = random.Random(seed)
        victims = chance.sample(range(NUM_INSTANCES), NUM_INSTANCES - 1)
        counts = tuple(max(0, chance.randrange(-100, 200)) for _ in victims)
        delays = tuple(chance.uniform(0, 0.3) for _ in victims)
        return Round(seed, chance.choice(["tcp", "shm"]), tuple(victims), counts, delays)


@pytest.fixture(scope="module")
def expected(tiny_folder):
    return answers_of_one_process(tiny_folder, JOBS)


def run(cluster: DistAttentionCluster, expected, at: int = -1, kill=lambda: None) -> dict[int, str]:
    """The reasons of jobs that failed; all tokens must be right, and those of others complete."""
    answers: list[list[int]] = [[] for _ in JOBS]
    failures: dict[int, str] = {}
    try:
        run_and_kill(cluster, JOBS, answers, at, kill)
    except RequestFailed as error:
        failures = error.reasons
    for index, (answer, whole) in enumerate(zip(answers, expected, strict=True)):
        assert answer == (whole[: len(answer)] if index in failures else whole)
    return failures


def kill_all_but_one(plan: Round, folder, expected) -> Counter[str]:
    pool = LoanOptions(heartbeat_s=0.2, lease_s=2.0, answer_s=2.0)
    options = InstanceOptions(
        str(folder),
        transports=(plan.transport,),
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        chunk_tokens=32,
        wait_s=1.0,
        deadline_s=WAIT_S,
        loan_options=pool,
    )
    counts: Counter[str] = Counter()
    with DistAttentionCluster(options, NUM_INSTANCES) as cluster:
        cluster.wait_until_ready()
        processes = [process.process for process in cluster.processes]
        for number, victim in enumerate(plan.victims):
            kill = (processes[victim].pid, signal.SIGKILL)
            timer = threading.Timer(plan.delays_s[number], os.kill, kill)
            failures = run(cluster, expected, plan.num_tokens[number], timer.start)
            timer.join(timeout=WAIT_S)
            eventually(lambda count=number + 1: len(cluster._dead) == count)
            gone = [cluster.names[f"instance {i}"] for i in plan.victims[: number + 1]]
            for reason in failures.values():
                is_home = f"the instance {victim} process was killed by signal 9" in reason
                is_lender = any(name in reason for name in gone)
                is_room = "no instances lend the rest now" in reason  # too few are left
                assert is_home or is_lender or is_room, reason
                what = "home" if is_home else "lender" if is_lender else "room"
                counts[f"failed by its {what}"] += 1
            counts["served"] += len(JOBS) - len(failures)
            counts["kills"] += 1
            eventually(lambda: cluster.ledger.loans() == {})
        (token,) = cluster.run([FULL])  # which needs every block of the last one
        assert token.finish_reason
        fits = {index for index, job in enumerate(JOBS) if len(job.prompt_tokens) < 180}
        assert set(run(cluster, expected)).isdisjoint(fits)
    last = ({*range(NUM_INSTANCES)} - {*plan.victims}).pop()
    assert [processes[victim].exitcode for victim in plan.victims] == [-9] * len(plan.victims)
    assert processes[last].exitcode in (0, -signal.SIGKILL)  # by force if it did not end soon
    return counts


def test_cluster_survives_instance_kills_at_random_moments(tiny_folder, expected, soak):
    def one_round(seed: int) -> Counter[str]:
        plan = Round.of(seed)
        sys.stdout.write(f"{plan}\n")
        return kill_all_but_one(plan, tiny_folder, expected)

    do_rounds(50 if soak else 1, 1, one_round)
