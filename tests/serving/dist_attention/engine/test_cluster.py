"""Instances in processes of their own: equal tokens, and every way to fail."""

import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from mooncake_serving.dist_attention import LoanOptions
from mooncake_serving.dist_attention.engine import (
    DistAttentionCluster,
    InstanceOptions,
    Job,
    RequestFailed,
    WorkerFailed,
)
from mooncake_serving.dist_attention.engine import cluster as cluster_module
from mooncake_serving.dist_attention.engine.instance import Instance
from mooncake_serving.engine import Engine, PagedKVCache, SamplingParams, load_model
from mooncake_serving.engine.process import Process
from tests.waiting import eventually

WAIT_S = 120.0  # longer than anything here takes
PARAMS = SamplingParams(max_tokens=20, ignore_eos=True)
SAY_MUCH = SamplingParams(max_tokens=200, ignore_eos=True)
LONG, SHORT = [5, 9, 4, 7, 3] * 50, list(range(3, 60))


def options(folder, **changes):
    defaults = {"num_blocks": 30, "block_size": 8, "chunk_tokens": 32, "deadline_s": WAIT_S}
    return InstanceOptions(model=str(folder), **{**defaults, **changes})


def collect(cluster, jobs):
    """Tokens and reasons of failures, by job."""
    answers = [[] for _ in jobs]
    tokens, failures = drain(cluster.run(jobs))
    for token in tokens:
        answers[token.request_id].append(token.token_id)
    return answers, failures


def drain(run):
    """All tokens of a run, and the reasons of its failures, by job."""
    tokens = []
    try:
        tokens.extend(run)  # keeps what comes before an error
    except RequestFailed as error:
        return tokens, error.reasons
    return tokens, {}


@pytest.fixture(scope="module")
def expected(tiny_folder):
    model, _ = load_model(tiny_folder, batch_invariant=True)
    engine = Engine(model, PagedKVCache(model.config, 64, block_size=8), chunk_tokens=32)
    return [answer.token_ids for answer in engine.generate([LONG, SHORT], PARAMS)]


@pytest.fixture(scope="module")
def pair(tiny_folder):
    """Two instances that survive the tests which use them."""
    with DistAttentionCluster(options(tiny_folder, wait_s=0.5), 2) as cluster:
        yield cluster


def test_a_prompt_larger_than_an_instance_is_answered(pair, expected):
    for _ in range(2):  # the blocks were given back
        assert collect(pair, [Job(LONG, PARAMS), Job(SHORT, PARAMS)]) == (expected, {})
    eventually(lambda: pair.ledger.loans() == {})


def test_closed_run_is_aborted(pair, expected):
    run = pair.run([Job(LONG, PARAMS)])
    next(run)
    with pytest.raises(ValueError, match="run must not begin before the last run"):
        next(pair.run([Job(SHORT, PARAMS)]))
    run.close()
    eventually(lambda: pair.ledger.loans() == {})
    assert collect(pair, [Job(LONG, PARAMS)]) == (expected[:1], {})


def test_oversized_and_bad_prompts_fail_alone(pair, expected):
    too_long = Job([5] * 500, PARAMS)
    answers, failures = collect(
        pair, [too_long, Job(SHORT, PARAMS), Job([5] * 600, PARAMS), Job([10**6], PARAMS)]
    )
    assert set(failures) == {0, 2, 3} and failures[0].startswith("instance 0: step: ")
    assert "no instances lend the rest now" in failures[0] and answers[1] == expected[1]
    assert "must be shorter than" in failures[2] and "must be in" in failures[3]


def test_invalid_job_is_rejected_without_harming_instances(pair, expected):
    for jobs, message in (
        ([Job(SHORT, PARAMS), [1, 2, 3]], r"jobs\[1\] must be a Job, got \[1, 2, 3\]"),
        (5, "jobs must be Jobs, got 5"),
    ):
        with pytest.raises(ValueError, match=f"^run: {message}$"):
            list(pair.run(jobs))
    assert collect(pair, [Job(SHORT, PARAMS)] * 2) == ([expected[1]] * 2, {})


def test_request_that_breaks_its_instance_fails_alone(pair, expected, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(cluster_module, "as_jobs", list)
        _, failures = collect(pair, [[1, 2, 3]])
        assert failures[0].startswith("instance 0: AttributeError: 'list' object has no")
    assert collect(pair, [Job(SHORT, PARAMS)] * 2) == ([expected[1]] * 2, {})


def test_more_jobs_than_the_pipes_hold(pair):
    """In both directions."""
    jobs = [Job([5], SamplingParams(max_tokens=1, ignore_eos=True))] * 600
    answers, failures = collect(pair, jobs)
    assert failures == {} and all(len(answer) == 1 for answer in answers)


class NotRead:
    """Raises where it is read from a pipe."""

    def __reduce__(self):
        return int, ("x",)


def test_failed_instance_gets_no_jobs_while_exiting(tiny_folder, expected):
    with DistAttentionCluster(options(tiny_folder), 2) as cluster:
        run = cluster.run([Job(SHORT, SAY_MUCH)])
        next(run)
        cluster.processes[0].send(NotRead())
        _, failures = drain(run)
        assert "the instance 0 process failed: ValueError: invalid literal" in failures[0]
        for _ in range(3):
            assert collect(cluster, [Job(SHORT, PARAMS)]) == ([expected[1]], {})


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("abc", PARAMS), r"prompt_tokens\[0\] must be an integer, got 'a'"),
        ((5, PARAMS), "prompt_tokens must be integers, got 5"),
        (([], PARAMS), r"prompt_tokens must be at least one token, got \[\]"),
        ((SHORT, {"max_tokens": 3}), "params must be SamplingParams, got {'max_tokens': 3}"),
    ],
)
def test_job_rejects_bad_arguments(arguments, message):
    with pytest.raises(ValueError, match=f"^Job: {message}$"):
        Job(*arguments)


def test_job_accepts_any_integers():
    assert Job(iter([1, 2]), PARAMS) == Job(np.array([1, 2]), PARAMS) == Job([1, 2], PARAMS)


def test_job_behind_an_oversized_one_is_answered(pair, expected):
    jobs = [Job([5] * 500, PARAMS), Job(SHORT, PARAMS), Job(SHORT, PARAMS)]  # 0 and 2 at one
    answers, failures = collect(pair, jobs)
    assert list(failures) == [0] and answers[1:] == [expected[1]] * 2


def test_heartbeats_count_as_progress_until_the_instance_stops(tiny_folder, expected):
    beats = options(tiny_folder, wait_s=6.0, loan_options=LoanOptions(heartbeat_s=0.2))
    with DistAttentionCluster(beats, 2) as cluster:
        cluster.wait_until_ready()
        cluster.options = replace(beats, deadline_s=3.0)  # loading takes longer
        _, failures = collect(cluster, [Job([5] * 500, PARAMS)])
        assert "no instances lend the rest now" in failures[0], "after a silence of 6 s"
        home = cluster.processes[0].process.pid
        os.kill(home, signal.SIGSTOP)
        try:
            with pytest.raises(WorkerFailed, match="^instance 0 has reported nothing for 3 s"):
                collect(cluster, [Job(LONG, PARAMS)])
        finally:
            os.kill(home, signal.SIGCONT)
        assert collect(cluster, [Job(LONG, PARAMS)]) == (expected[:1], {})


def test_startup_has_its_own_time_limit(tiny_folder):
    with DistAttentionCluster(options(tiny_folder, deadline_s=0.05), 1) as cluster:
        cluster.wait_until_ready()
    with DistAttentionCluster(options(tiny_folder, start_s=0.5), 1) as cluster:
        os.kill(cluster.processes[0].process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerFailed, match=r"has reported nothing for 0\.5 s"):
            cluster.wait_until_ready()


def test_a_killed_lender_fails_its_borrowers_and_the_others_go_on(tiny_folder, expected):
    """Instance 0 borrows from the larger of the others by name; that one is killed."""
    with DistAttentionCluster(options(tiny_folder), 3) as cluster:
        run = cluster.run(
            [Job(LONG, SAY_MUCH), Job([3], PARAMS), Job([4], PARAMS), Job([5], SAY_MUCH)]
        )
        tokens = [next(run)]
        while all(token.request_id != 0 for token in tokens):
            tokens.append(next(run))
        [(borrower, lender)] = cluster.ledger.loans()
        [victim] = [p for p in cluster.processes if cluster.names[p.name] == lender]
        home = cluster.names["instance 0"]
        assert borrower == home != lender
        os.kill(victim.process.pid, signal.SIGKILL)
        rest, failures = drain(run)
        tokens += rest
        assert f"were at instance {lender}" in failures[0]
        assert 3 not in failures, "of instance 0, and nothing of it was elsewhere"
        assert len([token for token in tokens if token.request_id == 3]) == 200
        assert cluster.ledger.loans() == {}
        answers, failures = collect(cluster, [Job(LONG, PARAMS), Job(SHORT, PARAMS)])
        assert (answers, failures) == (expected, {}), "the other two lend to each other"


def test_a_killed_borrower_gives_back_what_it_had(tiny_folder, expected):
    """Over shm, where a peer's death is not seen at a connection: the lease ends."""
    pool = LoanOptions(lease_s=2.0, heartbeat_s=0.2)
    with DistAttentionCluster(
        options(tiny_folder, transports=("shm",), loan_options=pool), 2
    ) as cluster:
        assert collect(cluster, [Job(LONG, PARAMS)]) == (expected[:1], {})
        run = cluster.run([Job(LONG, SAY_MUCH)])
        next(run)
        assert list(cluster.ledger.loans())
        os.kill(cluster.processes[0].process.pid, signal.SIGKILL)
        _, failures = drain(run)
        assert failures == {0: "instance 0: the instance 0 process was killed by signal 9"}
        eventually(lambda: cluster.ledger.loans() == {})
        assert collect(cluster, [Job(SHORT, PARAMS)]) == ([expected[1]], {})
    with pytest.raises(WorkerFailed, match="the cluster is closed"):
        next(cluster.run([Job(SHORT, PARAMS)]))


def test_a_stopped_lender_is_given_up(tiny_folder):
    slow = options(tiny_folder, loan_options=LoanOptions(answer_s=1.0))
    with DistAttentionCluster(slow, 2) as cluster:
        run = cluster.run([Job(LONG, SAY_MUCH)])
        next(run)
        lender = cluster.processes[1].process.pid
        os.kill(lender, signal.SIGSTOP)
        try:
            _, failures = drain(run)
            assert cluster.names["instance 1"] in failures[0]
        finally:
            os.kill(lender, signal.SIGCONT)


def test_instance_without_a_launcher_exits(tiny_folder):
    process = Process("alone", Instance, options(tiny_folder))
    process.pipe.close()
    process.process.join(timeout=WAIT_S)
    assert process.process.exitcode == 0
    process.close()


@pytest.mark.parametrize(("heartbeat_s", "stale_s"), [(1.0, 5.0), (10.0, 30.0)])
def test_ledger_tolerates_late_heartbeats(tmp_path, heartbeat_s, stale_s):
    slow = options(tmp_path / "none", loan_options=LoanOptions(heartbeat_s=heartbeat_s))
    with DistAttentionCluster(slow, 1) as cluster:
        assert cluster.ledger._stale_s == stale_s


def test_missing_model_is_reported(tmp_path):
    with DistAttentionCluster(options(tmp_path / "none"), 1) as cluster:
        with pytest.raises(WorkerFailed, match="process failed: .*none"):
            cluster.wait_until_ready()
        with pytest.raises(WorkerFailed, match="process failed: .*none"):
            next(cluster.run([Job(SHORT, PARAMS)]))  # and at once


@pytest.mark.parametrize(
    "changes, name",
    [
        ({"num_blocks": 0}, "num_blocks"),
        ({"transports": ("local",)}, "transports"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"start_s": 0}, "start_s"),
        ({"threads": True}, "threads"),
        ({"num_blocks": 3}, "min_own_blocks"),
        ({"transports": "tcp"}, "transports"),
        ({"transports": None}, "transports"),
        ({"model": 5}, "model"),
        ({"loan_options": None}, "loan_options"),
        ({"wait_s": True}, "wait_s"),
        ({"deadline_s": "1"}, "deadline_s"),
        ({"secret": "short"}, "secret"),
    ],
)
def test_bad_options_are_named(changes, name):
    with pytest.raises(ValueError, match=f"^InstanceOptions: {name} must be "):
        InstanceOptions(**changes)


def test_what_is_no_options_starts_no_process():
    with pytest.raises(
        ValueError, match="^DistAttentionCluster: options must be InstanceOptions, got 5"
    ):
        DistAttentionCluster(5)
