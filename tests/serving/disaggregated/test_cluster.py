"""Prefill and decode in two real processes: equal tokens, and every way to fail."""

import gc
import multiprocessing
import os
import pickle
import re
import signal
from dataclasses import replace

import pytest

import mooncake_kernels as mk
from mooncake_serving.engine import Engine, PagedKVCache, SamplingParams, load_model
from mooncake_serving.engine.disaggregated import (
    STEPS,
    Cluster,
    Job,
    RequestFailed,
    WorkerFailed,
    WorkerOptions,
)
from mooncake_serving.engine.disaggregated import cluster as cluster_module
from mooncake_serving.engine.disaggregated.decode_worker import DecodeWorker
from mooncake_serving.engine.disaggregated.messages import (
    Computed,
    Failed,
    Handover,
    Ready,
    Reserve,
    Reserved,
    Sender,
)

WAIT_S = 120.0  # longer than anything here takes
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
PROMPTS = [[5, 9, 4], list(range(3, 40)), [7] * 100, list(range(100, 3, -1))]


def options(folder, **changes):
    defaults = {"num_blocks": 64, "block_size": 8, "num_staging_blocks": 32, "chunk_tokens": 16}
    return WorkerOptions(model=str(folder), **{**defaults, "deadline_s": WAIT_S, **changes})


def collect(cluster, jobs):
    answers = [[] for _ in jobs]
    for token in cluster.run(jobs):
        answers[token.request_id].append(token.token_id)
    return answers


@pytest.fixture(scope="module")
def shared(tiny_folder):
    """A cluster for all tests that leave it as it was."""
    with Cluster(options(tiny_folder, num_staging_blocks=100)) as cluster:
        cluster.wait_until_ready()
        yield cluster


def test_same_tokens_as_a_single_process(tiny_folder):
    model, _ = load_model(tiny_folder, batch_invariant=True)
    engine = Engine(model, PagedKVCache(model.config, 64, block_size=8), chunk_tokens=16)
    with Cluster(options(tiny_folder)) as cluster:
        for params in (GREEDY, SAMPLED):
            expected = [answer.token_ids for answer in engine.generate(PROMPTS, params)]
            assert collect(cluster, [Job(prompt, params) for prompt in PROMPTS]) == expected
            again = collect(cluster, [Job(PROMPTS[2], params)])  # the blocks were given back
            assert again == [expected[2]]
        rows = {step.name: step for step in cluster.life.rows()}
    assert list(rows) == list(STEPS), "every step of a block's life was seen, in its order"
    assert rows["gathered"].num_bytes == rows["moved"].num_bytes == rows["scattered"].num_bytes > 0
    assert all(step.seconds > 0 for step in rows.values())


def test_concurrent_decodes_are_limited_to_max_requests(tiny_folder):
    """A request that has begun goes on: others begin when one ends."""
    jobs = [Job([11, i + 3], GREEDY) for i in range(6)]
    decoding, order = set(), []
    with Cluster(options(tiny_folder, max_requests=2)) as cluster:
        for token in cluster.run(jobs):
            decoding.add(token.request_id)
            assert len(decoding) <= 2
            if token.finish_reason:
                decoding.remove(token.request_id)
                order.append(token.request_id)
    assert sorted(order) == list(range(6))


def test_prompt_that_can_never_fit_is_rejected(tiny_folder):
    with Cluster(options(tiny_folder, num_staging_blocks=4)) as cluster:
        with pytest.raises(RequestFailed, match="request 0, decode: .*staging pool of 4 blocks"):
            collect(cluster, [Job([5] * 100, GREEDY)])
    with Cluster(options(tiny_folder, num_blocks=4)) as cluster:
        with pytest.raises(RequestFailed, match="request 0, decode: "):
            collect(cluster, [Job([5] * 100, GREEDY)])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([10**6], "prompt_tokens.0. must be in"), ([5] * 600, "must be shorter than .* got 600")],
)
def test_bad_prompt_is_rejected_with_its_reason(shared, prompt, message):
    with pytest.raises(RequestFailed, match=f"request 0, decode: .*{message}"):
        collect(shared, [Job(prompt, GREEDY)])


def test_invalid_job_is_rejected_without_harming_workers(shared, monkeypatch):
    with pytest.raises(ValueError, match=r"^run: jobs\[0\] must be a Job, got \[1, 2, 3\]$"):
        collect(shared, [[1, 2, 3]])
    with monkeypatch.context() as patch:
        patch.setattr(cluster_module, "as_jobs", list)
        with pytest.raises(RequestFailed, match="request 0, decode: AttributeError: 'list'"):
            collect(shared, [[1, 2, 3]])
    assert len(collect(shared, [Job(PROMPTS[0], GREEDY)])[0]) == 12


def test_prompt_failing_at_prefill_frees_its_room(shared, monkeypatch):
    good, bad = Job([5] * 100, GREEDY), Job([5] * 99 + [10**6], GREEDY)
    send = shared.decode.send

    def send_good(command):
        send(replace(command, job=good) if isinstance(command, Reserve) else command)

    with monkeypatch.context() as patch:
        patch.setattr(shared.decode, "send", send_good)
        for _ in range(10):  # the cache and the staging pool have room for fewer
            with pytest.raises(RequestFailed, match="request 0, prefill: "):
                collect(shared, [bad])
    assert len(collect(shared, [good])[0]) == 12


def test_requests_that_fail_do_not_end_the_others(shared):
    good, bad = Job(PROMPTS[2], GREEDY), Job([10**6], GREEDY)
    expected = collect(shared, [good])[0]
    answers = {index: [] for index in range(5)}
    with pytest.raises(RequestFailed, match="request 1, .*; request 3, ") as caught:
        for token in shared.run([good, bad, good, bad, good]):
            answers[token.request_id].append(token.token_id)
    assert answers == {0: expected, 1: [], 2: expected, 3: [], 4: expected}
    assert list(caught.value.reasons) == [1, 3]
    assert re.match(r"decode: .*prompt_tokens\[0\] must be in", caught.value.reasons[3])
    assert collect(shared, [good]) == [expected]


def test_abandoned_run_does_not_disturb_the_next(shared):
    left, job = Job(PROMPTS[0], GREEDY), Job(PROMPTS[2], GREEDY)
    expected = collect(shared, [job])
    for _ in range(2):
        tokens = shared.run([left] * 3)
        next(tokens)
        with pytest.raises(ValueError, match="finished or closed, got 3 unfinished jobs"):
            collect(shared, [job])
        tokens.close()
        assert collect(shared, [job]) == expected
    ended = shared.run([left])
    for _ in range(12):
        next(ended)
    tokens = shared.run([job])
    first = next(tokens)
    ended.close()  # which has nothing to abort
    assert [token.token_id for token in (first, *tokens)] == expected[0]
    with pytest.raises(RequestFailed, match="request 1, "):
        collect(shared, [left, Job([10**6], GREEDY), left])
    assert collect(shared, [job]) == expected


def test_requests_wait_for_room_and_abandoned_ones_free_it(tiny_folder):
    """Both the cache and the staging pool hold fewer requests than there are, which are abandoned
    wherever they are: waiting for room, at prefill, on their way or decoding.
    """
    jobs = [Job([11, i + 3] * 20, GREEDY) for i in range(8)]
    with Cluster(options(tiny_folder, num_blocks=16, num_staging_blocks=7)) as cluster:
        assert [len(answer) for answer in collect(cluster, jobs)] == [12] * 8
        for num_tokens in (1, 2, 14, 30):
            tokens = cluster.run(jobs)
            for _ in range(num_tokens):
                next(tokens)
            tokens.close()
        assert [len(answer) for answer in collect(cluster, jobs)] == [12] * 8


class Overheard:
    """Keep what a cluster's workers report."""

    def __init__(self, cluster, monkeypatch):
        self.engine_names = {}
        reports = cluster._reports

        def recorded():
            for process, report in reports():
                if isinstance(report, Ready):
                    self.engine_names[process.name] = report.engine_name
                self.each(report)
                yield process, report

        monkeypatch.setattr(cluster, "_reports", recorded)

    def each(self, report):
        """Replaced by tests that act on a report."""


def test_workers_reject_unauthenticated_peers(tiny_folder, monkeypatch):
    with Cluster(options(tiny_folder)) as cluster:
        names = Overheard(cluster, monkeypatch).engine_names
        cluster.wait_until_ready()
        for secret in (None, "another secret of the same kind"):
            with mk.TransferEngine(transports=["tcp"], secret=secret) as stranger:
                for name in (names["prefill"], names["decode"]):
                    with pytest.raises(mk.TransferError, match="secret"):
                        stranger.write(stranger.open(name), [], notify=b"hello").wait()
        assert len(collect(cluster, [Job(PROMPTS[0], GREEDY)])[0]) == 12
    assert "secret" not in repr(cluster.options)


def test_handover_is_accepted_only_from_prefill(tiny_folder, monkeypatch):
    """Even of someone who knows the secret."""
    job = Job(PROMPTS[1], GREEDY)
    last_key = int(mk.block_hashes(job.prompt_tokens, 8)[-1])
    secret = "known to all, alas"
    with (
        Cluster(options(tiny_folder, secret=secret)) as cluster,
        mk.TransferEngine(transports=["tcp"], secret=secret) as stranger,
    ):
        expected = collect(cluster, [job])
        overheard = Overheard(cluster, monkeypatch)

        def forge(report):
            if isinstance(report, Reserved):
                peer = stranger.open(report.target.engine_name)
                forged = Handover(report.request_id, 7, last_key).encode()
                stranger.write(peer, [], notify=forged).wait()

        monkeypatch.setattr(overheard, "each", forge)
        assert collect(cluster, [job] * 2) == expected * 2


def test_malformed_handover_notification_is_dropped(tiny_folder):
    """Of prefill, too: one notification that cannot be read does not end decode."""
    read, write = multiprocessing.Pipe()
    worker = DecodeWorker(write, options(tiny_folder))
    with worker.transfer, mk.TransferEngine(transports=["tcp"]) as prefill:
        worker.handle(Sender(prefill.name))
        peer = prefill.open(worker.transfer.name)
        worker.handle(Reserve(1, Job([5, 6], GREEDY)))
        worker.work()
        bad = Handover(1, 10**6, None).encode()  # of no such token
        for message in (b"hello", b"\xff", b"[" * 60000, b"{}", b'{"request_id": 1}', bad):
            prefill.write(peer, [], notify=message).wait()
        while not any(isinstance(report, Failed) for report in received(read)):
            worker.work()
        assert worker.engine.allocator.num_free == worker.cache.num_blocks
        assert worker.staging.allocate(worker.staging.num_blocks) == 0


def received(pipe):
    while pipe.poll():
        yield pipe.recv()


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"null",
        b"[1, 2, 3]",
        b'{"request_id": 1, "first_token": 2}',
        b'{"request_id": 1, "first_token": 2, "last_key": 3, "more": 4}',
        b'{"request_id": "1", "first_token": 2, "last_key": 3}',
        b'{"request_id": 1, "first_token": null, "last_key": 3}',
        b'{"request_id": 1, "first_token": 2.0, "last_key": 3}',
        b'{"request_id": true, "first_token": 2, "last_key": 3}',
    ],
)
def test_malformed_handover_is_rejected(message):
    with pytest.raises(ValueError, match="^Handover: "):
        Handover.decode(message)


def test_handover_round_trips():
    for last_key in (None, 0, 2**64 - 1):
        handover = Handover(3, 4, last_key)
        assert Handover.decode(handover.encode()) == handover


def test_invalid_options_start_no_process():
    before = multiprocessing.active_children()
    for bad in (None, {"num_blocks": 8}):
        with pytest.raises(ValueError, match="^Cluster: options must be WorkerOptions, got"):
            Cluster(bad)
    assert multiprocessing.active_children() == before


def test_missing_model_is_reported(tmp_path):
    with Cluster(options(tmp_path / "nowhere")) as cluster:
        with pytest.raises(WorkerFailed, match=r"ModelNotFound.*nowhere"):
            cluster.wait_until_ready()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transports": ("local",)}, r"transports must be between processes: .* got \('local',\)"),
        ({"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"),
        ({"chunk_tokens": "8"}, "chunk_tokens must be an integer, got '8'"),
        ({"deadline_s": "1"}, "deadline_s must be positive and finite, got '1'"),
        ({"deadline_s": 0}, "deadline_s must be positive and finite, got 0"),
        ({"deadline_s": float("nan")}, "deadline_s must be positive and finite, got nan"),
        ({"deadline_s": True}, "deadline_s must be positive and finite, got True"),
        ({"start_s": 0}, "start_s must be positive and finite, got 0"),
        ({"max_requests": 0}, "max_requests must be at least 1, got 0"),
        ({"transports": "tcp"}, "transports must be among shm, tcp, got 'tcp'"),
        ({"transports": (1,)}, r"transports must be among shm, tcp, got \(1,\)"),
        ({"model": 5}, "model must be a path or None, got 5"),
        ({"device": None}, "device must be a string, got None"),
        ({"axes": 5}, "axes must be a string, got 5"),
        (
            {"secret": "known"},
            "secret must be a string of 16 to 1024 characters, or None, got 'str'",
        ),
    ],
)
def test_options_are_checked_before_a_process_starts(changes, message):
    with pytest.raises(ValueError, match="WorkerOptions: " + message):
        WorkerOptions(**changes)


@pytest.mark.parametrize("victim", ["prefill", "decode"])
@pytest.mark.parametrize("after", [0, 3])
def test_killed_process_gives_one_clear_error(tiny_folder, victim, after):
    long = SamplingParams(max_tokens=300, ignore_eos=True)
    with Cluster(options(tiny_folder)) as cluster:
        cluster.wait_until_ready()
        tokens = cluster.run([Job(prompt, long) for prompt in PROMPTS])
        with pytest.raises((WorkerFailed, RequestFailed)) as caught:
            for count, _ in enumerate(tokens):
                if count == after:
                    os.kill(getattr(cluster, victim).process.pid, signal.SIGKILL)
        assert f"the {victim} process was killed by signal 9" in str(caught.value) or isinstance(
            caught.value, RequestFailed
        )


def test_startup_may_take_longer_than_the_deadline(tiny_folder):
    with Cluster(options(tiny_folder, deadline_s=0.05)) as cluster:
        cluster.wait_until_ready()  # imports alone take longer


def test_processes_that_hang_during_startup_are_given_up(tiny_folder):
    with Cluster(options(tiny_folder, start_s=0.5)) as cluster:
        for process in (cluster.prefill, cluster.decode):
            os.kill(process.process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerFailed, match=r"did not start: nothing was reported for 0\.5 s"):
            cluster.wait_until_ready()


def test_more_jobs_than_the_pipes_hold(shared):
    """More than the pipes hold, in both directions."""
    jobs = [Job(PROMPTS[0], SamplingParams(max_tokens=1, ignore_eos=True))] * 600
    assert all(len(answer) == 1 for answer in collect(shared, jobs))


MANY = [Job([5] * 200, GREEDY)] * 2000  # more than the pipe to a process holds


@pytest.mark.parametrize(
    ("victim", "jobs"), [("decode", [Job([5, 6, 7], GREEDY)]), ("prefill", MANY), ("decode", MANY)]
)
def test_jobs_sent_to_a_hanging_process_meet_the_deadline(tiny_folder, victim, jobs):
    with Cluster(options(tiny_folder)) as cluster:
        cluster.wait_until_ready()
        cluster.options = options(tiny_folder, deadline_s=2.0)
        os.kill(getattr(cluster, victim).process.pid, signal.SIGSTOP)
        with pytest.raises(WorkerFailed, match="neither process has reported for 2 s"):
            collect(cluster, jobs)


def test_long_prompt_reports_progress(shared, monkeypatch):
    """Each chunk is reported."""
    seen = []
    monkeypatch.setattr(Overheard, "each", lambda _, report: seen.append(report))
    Overheard(shared, monkeypatch)
    collect(shared, [Job([5] * 100, GREEDY)])
    reports = [report for report in seen if isinstance(report, Computed)]
    number = reports[-1].request_id  # runs that were abandoned may report as well
    done = [report.num_tokens for report in reports if report.request_id == number]
    assert done == [16, 32, 48, 64, 80, 96, 100]


def test_closed_cluster_ends_its_processes_and_gives_one_clear_error(tiny_folder):
    cluster = Cluster(options(tiny_folder))
    tokens = cluster.run([Job(PROMPTS[0], GREEDY)])
    next(tokens)
    cluster.close()
    cluster.close()
    assert not cluster.prefill.process.is_alive() and not cluster.decode.process.is_alive()
    for call in (
        lambda: list(tokens),
        lambda: collect(cluster, [Job(PROMPTS[0], GREEDY)]),
        lambda: cluster.wait_until_ready(),
    ):
        with pytest.raises(WorkerFailed, match="^the cluster is closed$"):
            call()


def test_the_processes_of_a_dropped_cluster_exit(tiny_folder):
    cluster = Cluster(options(tiny_folder))
    cluster.wait_until_ready()
    processes = [cluster.prefill.process, cluster.decode.process]
    del cluster
    gc.collect()
    for process in processes:
        process.join(timeout=WAIT_S)
        assert process.exitcode == 0


def test_failed_start_of_the_second_process_ends_the_first(tiny_folder, monkeypatch):
    before = multiprocessing.active_children()
    monkeypatch.setattr(cluster_module, "DecodeWorker", lambda: None)  # cannot be pickled
    with pytest.raises((pickle.PicklingError, AttributeError)) as caught:
        Cluster(options(tiny_folder))
    assert caught.value  # whose traceback still refers to the cluster
    assert set(multiprocessing.active_children()) <= set(before)


def test_a_worker_without_a_parent_exits(tiny_folder):
    """Its pipe closes with its launcher, however that ended."""
    cluster = Cluster(options(tiny_folder))
    cluster.wait_until_ready()
    cluster.decode.pipe.close()
    cluster.decode.process.join(timeout=WAIT_S)
    assert cluster.decode.process.exitcode == 0
    cluster.close()
