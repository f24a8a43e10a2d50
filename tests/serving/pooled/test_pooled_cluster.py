"""Instances in processes of their own: equal tokens, and every way to fail."""

import os
import signal

import pytest

from mooncake_serving.engine import Engine, PagedKVCache, SamplingParams, load_model
from mooncake_serving.engine.disaggregated import WorkerFailed
from mooncake_serving.engine.pooled import Failed, InstanceOptions, Job, NewToken, PooledCluster
from mooncake_serving.pooling import PoolOptions

from .conftest import wait_until

WAIT_S = 120.0  # longer than anything here takes
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
SAY_MUCH = SamplingParams(max_tokens=200, ignore_eos=True)
LONG, SHORT = [5, 9, 4, 7, 3] * 50, list(range(3, 60))


def options(folder, **changes):
    defaults = {"num_blocks": 30, "block_size": 8, "chunk_tokens": 32, "deadline_s": WAIT_S}
    return InstanceOptions(model=str(folder), **{**defaults, **changes})


def collect(cluster, jobs):
    """Tokens and reasons of failures, by job."""
    answers, failures = [[] for _ in jobs], {}
    for event in cluster.run(jobs):
        if isinstance(event, Failed):
            failures[event.request_id] = event.reason
        else:
            answers[event.request_id].append(event.token_id)
    return answers, failures


@pytest.fixture(scope="module")
def expected(tiny_folder):
    model, _ = load_model(tiny_folder, batch_invariant=True)
    engine = Engine(model, PagedKVCache(model.config, 64, block_size=8), chunk_tokens=32)
    return [answer.token_ids for answer in engine.generate([LONG, SHORT], PARAMS)]


@pytest.fixture(scope="module")
def pair(tiny_folder):
    """Two instances that survive the tests which use them."""
    with PooledCluster(options(tiny_folder, wait_s=0.5), 2) as cluster:
        yield cluster


def test_a_prompt_larger_than_an_instance_is_answered(pair, expected):
    for _ in range(2):  # the blocks were given back
        assert collect(pair, [Job(LONG, PARAMS), Job(SHORT, PARAMS)]) == (expected, {})
    wait_until(lambda: pair.ledger.debts() == {})


def test_a_run_that_is_closed_is_aborted(pair, expected):
    run = pair.run([Job(LONG, PARAMS)])
    next(run)
    with pytest.raises(ValueError, match="run must not begin before the last run"):
        next(pair.run([Job(SHORT, PARAMS)]))
    run.close()
    wait_until(lambda: pair.ledger.debts() == {})
    assert collect(pair, [Job(LONG, PARAMS)]) == (expected[:1], {})


def test_what_no_instances_hold_together_fails_and_bad_prompts_do(pair, expected):
    too_long = Job([5] * 500, PARAMS)
    answers, failures = collect(
        pair, [too_long, Job(SHORT, PARAMS), Job([], PARAMS), Job([10**6], PARAMS)]
    )
    assert "no instances lend the rest now" in failures[0] and answers[1] == expected[1]
    assert "must not be empty" in failures[2] and "must be in" in failures[3]


def test_a_killed_creditor_fails_its_debtors_and_the_others_go_on(tiny_folder, expected):
    """Instance 0 borrows from the larger of the others by name; that one is killed."""
    with PooledCluster(options(tiny_folder), 3) as cluster:
        run = cluster.run(
            [Job(LONG, SAY_MUCH), Job([3], PARAMS), Job([4], PARAMS), Job([5], SAY_MUCH)]
        )
        events = [next(run)]
        while not any(isinstance(e, NewToken) and e.request_id == 0 for e in events):
            events.append(next(run))
        [(debtor, creditor)] = cluster.ledger.debts()
        [victim] = [p for p in cluster.processes if cluster.names[p.name] == creditor]
        home = cluster.names["instance 0"]
        assert debtor == home != creditor
        os.kill(victim.process.pid, signal.SIGKILL)
        events += list(run)
        failures = {e.request_id: e.reason for e in events if isinstance(e, Failed)}
        assert f"were at instance {creditor}" in failures[0]
        assert 3 not in failures, "of instance 0, and nothing of it was elsewhere"
        assert len([e for e in events if isinstance(e, NewToken) and e.request_id == 3]) == 200
        assert cluster.ledger.debts() == {}
        answers, failures = collect(cluster, [Job(LONG, PARAMS), Job(SHORT, PARAMS)])
        assert (answers, failures) == (expected, {}), "the other two lend to each other"


def test_a_killed_debtor_gives_back_what_it_had(tiny_folder, expected):
    """Over shm, where a peer's death is not seen at a connection: the lease ends."""
    pool = PoolOptions(lease_s=2.0, heartbeat_s=0.2)
    with PooledCluster(options(tiny_folder, transports=("shm",), pool=pool), 2) as cluster:
        assert collect(cluster, [Job(LONG, PARAMS)]) == (expected[:1], {})
        run = cluster.run([Job(LONG, SAY_MUCH)])
        next(run)
        assert list(cluster.ledger.debts())
        os.kill(cluster.processes[0].process.pid, signal.SIGKILL)
        [failed] = [event for event in run if isinstance(event, Failed)]
        assert failed.reason == "the instance 0 process was killed by signal 9"
        wait_until(lambda: cluster.ledger.debts() == {})
        assert collect(cluster, [Job(SHORT, PARAMS)]) == ([expected[1]], {})
    with pytest.raises(WorkerFailed, match="the cluster is closed"):
        next(cluster.run([Job(SHORT, PARAMS)]))


def test_a_stopped_creditor_is_given_up(tiny_folder):
    slow = options(tiny_folder, pool=PoolOptions(answer_s=1.0))
    with PooledCluster(slow, 2) as cluster:
        run = cluster.run([Job(LONG, SAY_MUCH)])
        next(run)
        creditor = cluster.processes[1].process.pid
        os.kill(creditor, signal.SIGSTOP)
        try:
            [failed] = [event for event in run if isinstance(event, Failed)]
            assert cluster.names["instance 1"] in failed.reason
        finally:
            os.kill(creditor, signal.SIGCONT)


def test_a_model_that_is_not_there_is_reported(tmp_path):
    with PooledCluster(options(tmp_path / "none"), 1) as cluster:
        with pytest.raises(WorkerFailed, match="process failed: .*none"):
            cluster.wait_until_ready()


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"transports": ("local",)}, "transports"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"threads": True}, "threads"),
    ],
)
def test_bad_options_are_named(changes, name):
    with pytest.raises(ValueError, match=f"^InstanceOptions: {name} must be "):
        InstanceOptions(**changes)
