"""A disaggregated cluster: the conductor decides, prefill and decode instances execute."""

from collections.abc import Callable, Sequence
from math import inf

import numpy as np

from mooncake_serving.conductor import (
    AcceptAll,
    Conductor,
    Decision,
    Fetch,
    InvalidArgument,
    Reason,
    Request,
    Role,
    Why,
)

from .conducting import StoreTiers
from .decode import DecodeInstance
from .events import Clock
from .job import Job, jobs_of
from .kv_events import Publisher
from .measured_cost import InstanceCost
from .network import Flow, Network, Nic
from .options import DisaggregatedOptions, Failure
from .prefill import PrefillInstance
from .report import Report
from .step_cost import StepCost
from .store import NodeStore
from .traces import TraceRequest


class Disaggregated:
    """Replays a trace on prefill and decode instances; every decision is the conductor's.

    arrival: decide -> (fetch KV of the prefix) -> prefill, its KV streaming to the decode instance
    -> decode, once the last of it is there -> done. Source: FAST'25, section 3.2.

    Args:
        options: the cluster.
        conductor: over ``options.num_prefill`` prefill, then ``options.num_decode`` decode
            instances, by :func:`~.conducting.conductor_of`. It must not be shared: the simulation
            writes its state.
        on_progress: called whenever a request is over.
        cost: of what instances do; by default that of the model on the machine.

    Raises:
        InvalidArgument: the conductor is over other instances.
    """

    def __init__(
        self,
        options: DisaggregatedOptions,
        conductor: Conductor,
        *,
        on_progress: Callable[[], None] = lambda: None,
        cost: InstanceCost | None = None,
    ):
        _check_roles(options, conductor)
        self.options = options
        self.clock = Clock()
        self.jobs: list[Job] = []
        self.conductor = conductor
        self._on_progress = on_progress
        self._cost = cost or StepCost(options.model, options.machine)
        self.network = Network(self.clock)
        nodes = [options.prefill.group_size] * options.num_prefill + [1] * options.num_decode
        self.nics = [Nic(count * options.machine.nic_bytes_per_s) for count in nodes]
        self.publishers = [
            Publisher(self.clock, conductor.index, i, options.event_delay_s)
            for i in range(options.num_prefill)
        ]
        self.prefill = [self._make_prefill(i) for i in range(options.num_prefill)]
        if options.ssd_tokens:
            conductor.tiers = StoreTiers(self.prefill)
        capacity = options.machine.kv_capacity_tokens(options.model)
        self.decode = [
            DecodeInstance(
                self.clock,
                self._cost,
                capacity_tokens=capacity,
                max_batch_size=options.max_batch_size,
                finished=self._finish,
            )
            for _ in range(options.num_decode)
        ]
        self.streams: dict[Job, Flow] = {}
        self.landed: set[Job] = set()  # all KV is at the decode instance
        self._up_at_s: dict[int, float] = {}  # of instances that have failed
        self._waiting: list[Job] = []  # until one of them is back
        self._mean_output = 0
        self._has_run = False

    def run(self, requests: Sequence[TraceRequest]) -> Report:
        """Replay a trace to the last token of the last request.

        Raises:
            InvalidArgument: the requests are not in the order of their times, or this cluster has
                already run.
        """
        if self._has_run:
            raise InvalidArgument("Disaggregated.run: a cluster must run once, got a second trace")
        self.jobs += jobs_of("Disaggregated.run", requests)
        self._has_run = True
        self._mean_output = sum(r.output_length for r in requests) // max(1, len(requests))
        for job in self.jobs:
            self.clock.at(job.arrival_s, self._arrive, job)
        for failure in self.options.failures:
            self.clock.at(failure.at_s, self._fail, failure)
        self.clock.run()
        return Report(
            self.jobs,
            self.clock.num_events,
            peak_tokens=[instance.peak_tokens for instance in self.decode],
            sent_bytes=sum(nic.sent_bytes for nic in self.nics),
        )

    def _make_prefill(self, i: int) -> PrefillInstance:
        options = self.options
        store = NodeStore(
            options.dram_blocks,
            ssd_blocks=options.ssd_tokens // options.block_size,
            policy=options.eviction,
            lost=self.publishers[i].removed,
        )
        return PrefillInstance(
            self.clock,
            self._cost,
            store,
            options.prefill,
            block_size=options.block_size,
            started=self._started,
            done=self._prefilled,
        )

    # --- the life of a job -------------------------------------------------------------------

    def _arrive(self, job: Job) -> None:
        request = Request(
            job.job_id,
            job.request.input_length,
            job.request.hash_ids if self.options.prefill.use_cache else (),
            self.options.block_size,
            self._mean_output,
            max_output_tokens=job.request.output_length,
            waited_s=self.clock.now - job.arrival_s,
        )
        job.decision = decision = self.conductor.decide(request, self.clock.now)
        if not decision.accepted:
            self._reject(job, decision)
            return
        assert decision.prefill is not None
        self.conductor.commit(decision)
        job.prefill_instance = decision.prefill.instance
        job.decode_instance = decision.decode.instance if decision.decode else None
        job.expected_s = decision.prefill.occupied_s
        if decision.prefill.fetch is not None:
            self._fetch(job, decision, decision.prefill.fetch)
        self.prefill[job.prefill_instance].arrive(job)

    def _fetch(self, job: Job, decision: Decision, fetch: Fetch) -> None:
        job.ready = False
        job.fetched_s = self.clock.now + fetch.seconds
        source, target = self.prefill[fetch.source], self.prefill[fetch.target]
        keys = job.request.hash_ids
        first = min(fetch.first_block, target.store.match(keys)[0])  # what the target still has
        there, _ = source.store.match(keys[: fetch.first_block + fetch.num_blocks])
        tokens = min(there * self.options.block_size, job.request.input_length)
        tokens = max(0, tokens - first * self.options.block_size)  # what the source still has
        num_bytes = tokens * self.options.model.kv_bytes_per_token
        read_s = 0.0
        if tokens:  # in the end all of the prefix is in the target's DRAM
            read_s = max(source.read(keys[:there], first), target.read(keys[:first]))

        def over() -> None:
            self.conductor.fetched(decision)
            job.ready, job.fetch = True, None
            target.wake()

        def landed() -> None:
            job.fetched_tokens += tokens
            if tokens and target.store.match(keys[:first])[0] == first:
                self._store(fetch.target, keys[:there])
            over()

        job.fetch = self.network.send(
            self.nics[fetch.source],
            self.nics[fetch.target],
            num_bytes,
            landed,
            lost=over,
            limit_bytes_per_s=num_bytes / read_s if read_s else inf,
        )

    def _store(self, instance: int, keys: tuple[int, ...]) -> None:
        """Add blocks to a store, and publish them; the first may be evicted for the last."""
        store = self.prefill[instance].store
        store.insert(keys)
        held, _ = store.match(keys)
        self.publishers[instance].stored(keys[:held])

    def _started(self, job: Job) -> None:
        assert job.prefill_instance is not None
        self._report_queue(job.prefill_instance)
        if self.options.stream and job.decode_instance is not None and job.num_decode_steps:
            self._stream(job, job.decode_instance)

    def _report_queue(self, instance: int) -> None:
        """Tell the conductor when a prefill instance is free."""
        free_s = self.prefill[instance].expected_free_s
        self.conductor.cluster.free_at_s[instance] = free_s

    def _stream(self, job: Job, instance: int) -> None:
        """Send a job's KV to the instance that decodes it, unless it is there, or on its way.

        KV that was sent to another instance is useless there: it is sent again from its origin.
        """
        if instance == job.decode_instance and (job in self.streams or job in self.landed):
            return
        self._unsend(job)
        job.decode_instance = instance
        assert job.prefill_instance is not None

        def landed() -> None:
            self._end_stream(job)
            self.landed.add(job)
            self._try_decode(job)

        num_bytes = job.request.input_length * self.options.model.kv_bytes_per_token
        self.streams[job] = self.network.send(
            self.nics[job.prefill_instance],
            self.nics[instance],
            num_bytes,
            landed,
            lost=lambda: self._restart(job),
        )
        self._count_stream(job.prefill_instance, +1, num_bytes)

    def _end_stream(self, job: Job) -> None:
        """Stop a job's stream if it is on, and free what is left of it in its source's backlog."""
        assert job.prefill_instance is not None
        flow = self.streams.pop(job)
        self.network.cancel(flow)
        self._count_stream(job.prefill_instance, -1, -flow.remaining)

    def _count_stream(self, source: int, num_streams: int, num_bytes: float) -> None:
        """Tell the conductor, which knows only of fetches, what else an instance sends."""
        cluster = self.conductor.cluster
        backlog_from_s = max(float(cluster.sending_until_s[source]), self.clock.now)
        sending_s = num_bytes / self.nics[source].bytes_per_s
        cluster.sending_until_s[source] = backlog_from_s + sending_s
        cluster.num_sending[source] += num_streams

    def _prefilled(self, job: Job) -> None:
        assert job.prefill_instance is not None
        held, _ = self.prefill[job.prefill_instance].store.match(job.request.hash_ids)
        self.publishers[job.prefill_instance].stored(job.request.hash_ids[:held])
        job.decision = decision = self.conductor.prefilled(job.job_id, self.clock.now)
        if not decision.accepted or decision.decode is None:
            self._reject(job, decision)
        elif not job.num_decode_steps:
            self._finish(job)
        else:
            self._stream(job, decision.decode.instance)
            self._try_decode(job)

    def _try_decode(self, job: Job) -> None:
        """Decode a job if its prompt is prefilled, and its KV is there to the last layer."""
        if job.first_token_s is not None and job in self.landed:
            self.landed.discard(job)
            assert job.decode_instance is not None
            self.decode[job.decode_instance - self.options.num_prefill].arrive(job)

    def _unsend(self, job: Job) -> None:
        """Drop a job's KV that is waiting at a decode instance, or on its way to one."""
        self.landed.discard(job)
        if job in self.streams:
            self._end_stream(job)

    def _finish(self, job: Job) -> None:
        job.finished_s = self.clock.now
        self.conductor.decoded(job.job_id)
        self._on_progress()

    def _reject(self, job: Job, decision: Decision) -> None:
        if self._waits(job, decision.reason):
            return
        job.rejected = decision.reason.why.name
        self._unsend(job)
        self._on_progress()

    # --- failures of instances: what is lost, and how it is recovered ------------------------

    def _fail(self, failure: Failure) -> None:
        """Lose an instance with its KV for a while; its requests are decided about again.

        What was prefilled on another instance is in that one's cache, so that a decode instance's
        requests are soon back.
        """
        i, num_prefill = failure.instance, self.options.num_prefill
        lost = self.conductor.failed(i)
        if i < num_prefill:
            self.prefill[i].fail()
            self.publishers[i].lost_all()
        else:
            self.decode[i - num_prefill].fail()
        jobs = [self.jobs[job_id] for job_id in lost]
        for job in jobs:
            self._forget(job)
        self.network.fail(self.nics[i])
        up_at_s = self.clock.now + failure.down_s
        self._up_at_s[i] = max(up_at_s, self._up_at_s.get(i, 0.0))
        self.clock.after(failure.down_s, self._recover, i)
        for job in jobs:
            self._arrive(job)

    def _recover(self, instance: int) -> None:
        """Bring an instance back, unless it has failed again meanwhile, and for longer."""
        if self.clock.now >= self._up_at_s[instance]:
            self.conductor.recovered(instance)
            waiting, self._waiting = self._waiting, []
            for job in waiting:
                self._arrive(job)

    def _restart(self, job: Job) -> None:
        """Serve a job again whose prefill instance has failed while its KV was in flight."""
        if job.finished_s is None and job.rejected is None:
            self.conductor.decoded(job.job_id)
            self._forget(job)
            self.clock.after(0.0, self._arrive, job)

    def _waits(self, job: Job, reason: Reason) -> bool:
        """Keep a refused job until an instance is back, if all are accepted and it needs only that.

        Returns:
            Whether it was kept.
        """
        is_down = reason.why in (Why.NO_PREFILL_INSTANCE, Why.NO_DECODE_INSTANCE)
        if not is_down or not isinstance(self.conductor.admission, AcceptAll):
            return False
        if job.prefill_instance is not None:  # it is prefilled, and only its blocks are kept
            self._forget(job)
        self._waiting.append(job)
        return True

    def _forget(self, job: Job) -> None:
        """Remove a job from everything; what it fetched stays where it is."""
        if job.prefill_instance is not None:
            self.prefill[job.prefill_instance].drop(job)
            self._report_queue(job.prefill_instance)  # where it may be computed on, to no end
        if job.fetch is not None:
            self.network.cancel(job.fetch)
            job.fetch = None
        self._unsend(job)
        job.restart()
        job.ready = True


def _check_roles(options: DisaggregatedOptions, conductor: Conductor) -> None:
    counts, roles = (options.num_prefill, options.num_decode), conductor.cluster.role
    expected = np.repeat([int(Role.PREFILL), int(Role.DECODE)], counts)
    if not np.array_equal(roles, expected):
        raise InvalidArgument(
            f"Disaggregated: conductor must be over {counts[0]} prefill, then {counts[1]} decode "
            f"instances, got {np.count_nonzero(roles == Role.PREFILL)} and "
            f"{np.count_nonzero(roles == Role.DECODE)} of {len(roles)}"
        )
