"""Instances against a loop that runs every step separately, on small made-up loads."""

import random
from collections import deque
from itertools import pairwise

import pytest

from mooncake_simulator.coupled import CoupledInstance
from mooncake_simulator.coupled_options import Batching, CoupledOptions
from mooncake_simulator.decode import DecodeInstance
from mooncake_simulator.events import Clock
from mooncake_simulator.job import Job
from mooncake_simulator.machines import A800_NODE, LLAMA3_70B
from mooncake_simulator.running_batch import steps_by, steps_s
from mooncake_simulator.step_cost import StepCost
from mooncake_simulator.traces import TraceRequest

COST = StepCost(LLAMA3_70B, A800_NODE)
NOBODY = lambda job: None  # noqa: E731


def make_load(seed, rate, num_requests=80):
    rng = random.Random(seed)
    time, requests = 0.0, []
    for _ in range(num_requests):
        time += rng.expovariate(rate)
        prompt, output = rng.randint(1, 9000), rng.randint(1, 60)
        requests.append(TraceRequest(1e3 * time, prompt, output))
    return requests


class Reference:
    """One engine, one step after the other; a job is [request, done, generated, times]."""

    def __init__(self, requests, *, capacity, max_batch, batching, budget, whole):
        self.todo = deque([r, 0, 0, []] for r in requests)
        self.all = list(self.todo)
        self.waiting, self.prompts, self.batch = deque(), deque(), []
        self.capacity, self.max_batch = capacity, max_batch
        self.batching, self.budget, self.whole = batching, budget, whole
        self.now, self.after_chunks = 0.0, False

    def held(self):
        return sum(r.input_length + r.output_length for r, *_ in [*self.prompts, *self.batch])

    def run(self):
        while self.todo or self.waiting or self.prompts or self.batch:
            while self.todo and self.todo[0][0].timestamp_ms / 1e3 <= self.now:
                self.waiting.append(self.todo.popleft())
            if not (self.waiting or self.prompts or self.batch):
                self.now = self.todo[0][0].timestamp_ms / 1e3
                continue
            while self.waiting:
                r = self.waiting[0][0]
                full = len(self.prompts) + len(self.batch) >= self.max_batch
                if full or self.held() + r.input_length + r.output_length > self.capacity:
                    break
                self.prompts.append(self.waiting.popleft())
            self.step()
        return self.all

    def step(self):
        in_turn = self.batching is Batching.CHUNKED_ALONE
        chunks = [] if in_turn and self.after_chunks and self.batch else self.choose()
        self.after_chunks = bool(chunks)
        mixed = not chunks or self.batching in (Batching.CHUNKED, Batching.HYBRID)
        batch = self.batch if mixed else []
        kv = sum(r.input_length + generated - 1 for r, _, generated, _ in batch)
        work = [(tokens, job[1]) for job, tokens in chunks]
        self.now += COST.mixed_s(work, len(batch), kv)
        for job in batch:
            job[2] += 1
            job[3].append(self.now)
        self.batch = [job for job in self.batch if job[2] < job[0].output_length]
        for job, tokens in chunks:
            job[1] += tokens
            if job[1] == job[0].input_length:
                self.prompts.remove(job)
                job[2] = 1
                job[3].append(self.now)
                if job[0].output_length > 1:
                    self.batch.append(job)

    def choose(self):
        chunked = self.batching in (Batching.CHUNKED, Batching.CHUNKED_ALONE)
        room = self.budget if chunked else self.whole
        if self.batching is Batching.CHUNKED:
            room -= len(self.batch)
        chunks = []
        for job in self.prompts:
            left = job[0].input_length - job[1]
            tokens = min(left, room) if chunked else left
            if room <= 0 or (tokens > room and chunks):
                break
            chunks.append((job, tokens))
            room -= tokens
        return chunks


@pytest.mark.parametrize("rate", [0.5, 3.0, 30.0])
@pytest.mark.parametrize("batching", Batching)
def test_coupled_instance_matches_the_reference(batching, rate):
    requests = make_load(7, rate)
    options = CoupledOptions(
        batching=batching, token_budget=700, max_batched_tokens=6000, max_batch_size=12
    )
    clock = Clock()
    instance = CoupledInstance(
        clock, COST, options, capacity_tokens=60_000, prefilled=NOBODY, finished=NOBODY
    )
    jobs = [Job(i, r, r.timestamp_ms / 1e3) for i, r in enumerate(requests)]
    for job in jobs:
        clock.at(job.arrival_s, instance.arrive, job)
    clock.run()
    expected = Reference(
        requests, capacity=60_000, max_batch=12, batching=batching, budget=700, whole=6000
    ).run()
    assert instance.peak_tokens <= 60_000 and instance.reserved_tokens == 0
    for job, (request, _, generated, times) in zip(jobs, expected, strict=True):
        assert generated == request.output_length == len(times)
        assert job.first_token_s == pytest.approx(times[0])
        assert job.finished_s == pytest.approx(times[-1])
        gaps = [b - a for a, b in pairwise(times)]
        assert job.gaps_s().tolist() == pytest.approx(gaps)
        top = sorted(gaps)[len(gaps) - -(-len(gaps) // 10) :]
        assert job.tbt_s() == pytest.approx(sum(top) / len(top) if top else 0.0)


@pytest.mark.parametrize("rate", [2.0, 20.0, 200.0])
def test_decode_instance_matches_a_loop_over_steps(rate):
    requests = [r for r in make_load(11, rate, 150) if r.output_length > 1]
    capacity, max_batch = 80_000, 16
    clock = Clock()
    instance = DecodeInstance(
        clock, COST, capacity_tokens=capacity, max_batch_size=max_batch, finished=NOBODY
    )
    jobs = [Job(i, r, r.timestamp_ms / 1e3) for i, r in enumerate(requests)]
    for job in jobs:
        job.first_token_s = job.arrival_s
        clock.at(job.arrival_s, instance.arrive, job)
    clock.run()

    now, batch, waiting, todo, ends = 0.0, [], deque(), deque(enumerate(requests)), {}
    while todo or waiting or batch:
        while todo and todo[0][1].timestamp_ms / 1e3 <= now:
            waiting.append(todo.popleft())
        while waiting and len(batch) < max_batch:
            held = sum(r.input_length + r.output_length for _, r, _ in batch)
            i, r = waiting[0]
            if held + r.input_length + r.output_length > capacity:
                break
            waiting.popleft()
            batch.append([i, r, 0])
        if not batch:
            now = todo[0][1].timestamp_ms / 1e3
            continue
        now += COST.decode_s(len(batch), sum(r.input_length + done for _, r, done in batch))
        for member in batch:
            member[2] += 1
            ends[member[0]] = now
        batch = [member for member in batch if member[2] < member[1].output_length - 1]

    assert instance.peak_tokens <= capacity
    assert [job.finished_s for job in jobs] == pytest.approx([ends[i] for i in range(len(jobs))])
    for job in jobs:
        assert job.gaps_s().sum() == pytest.approx(job.finished_s - job.first_token_s)


def test_closed_form_of_growing_steps_matches_the_sum():
    for first, growth in ((0.02, 0.0), (0.02, 1e-6), (0.3, 0.01)):
        for count in (1, 2, 7, 1000):
            total = sum(first + growth * i for i in range(count))
            assert steps_s(count, first, growth) == pytest.approx(total)
            assert steps_by(total - first / 2, first, growth) == count
            assert steps_by(total + first / 2, first, growth) == count + 1
        assert steps_by(0.0, first, growth) == 1
