"""A cluster of coupled instances, as in vLLM: one instance serves a request throughout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mooncake_serving.conductor import (
    InvalidArgument,
    KVCacheCentric,
    LoadBalance,
    LocalCacheAware,
    PrefillPolicy,
    Request,
    Role,
)
from mooncake_serving.conductor.errors import check_count, check_instance

from .conducting import fit_costs, make_conductor
from .coupled import CoupledInstance
from .coupled_options import CoupledOptions
from .events import Clock
from .job import Job, jobs_of
from .machines import A800_NODE, LLAMA3_70B, Machine, Model
from .report import Report
from .step_cost import StepCost
from .traces import BLOCK_SIZE, TraceRequest


@dataclass(frozen=True)
class CoupledClusterOptions:
    """Instances that prefill and decode, and their options."""

    model: Model = LLAMA3_70B
    machine: Machine = A800_NODE
    num_instances: int = 16
    engine: CoupledOptions = field(default_factory=CoupledOptions)

    def __post_init__(self) -> None:
        op = "CoupledClusterOptions"
        check_count(op, "num_instances", self.num_instances, 1)
        check_instance(op, "machine", self.machine, Machine)
        check_instance(op, "engine", self.engine, CoupledOptions)
        self.machine.kv_capacity_tokens(self.model)  # the model must fit


class CoupledCluster:
    """Replays a trace on coupled instances; the conductor chooses one for each request.

    Args:
        options: the cluster.
        policy: where a request goes; by default to the shortest queue. The conductor does not know
            what coupled instances have cached, so none that is about caches.
        on_progress: called whenever a request is over.
        seed: of the policy.

    Raises:
        InvalidArgument: the policy is about caches.
    """

    def __init__(
        self,
        options: CoupledClusterOptions,
        policy: PrefillPolicy | None = None,
        *,
        on_progress: Callable[[], None] = lambda: None,
        seed: int = 0,
    ):
        if isinstance(policy, (KVCacheCentric, LocalCacheAware)):
            raise InvalidArgument(
                f"CoupledCluster: policy must be one that needs no caches, got {policy!r}"
            )
        self.clock = Clock()
        self.jobs: list[Job] = []
        self._has_run = False
        self._on_progress = on_progress
        capacity = options.machine.kv_capacity_tokens(options.model)
        budget = options.engine.max_batched_tokens
        self._conductor = make_conductor(
            [Role.BOTH] * options.num_instances,
            fit_costs(options.model, options.machine, budget),
            capacity_tokens=capacity,
            max_batch_size=options.engine.max_batch_size,
            policy=policy or LoadBalance(),
            seed=seed,
        )
        self.instances = [
            CoupledInstance(
                self.clock,
                StepCost(options.model, options.machine),
                options.engine,
                capacity_tokens=capacity,
                prefilled=self._prefilled,
                finished=self._finish,
            )
            for _ in range(options.num_instances)
        ]

    def run(self, requests: Sequence[TraceRequest]) -> Report:
        """Replay a trace to the last token of the last request.

        Raises:
            InvalidArgument: the requests are not in the order of their times, or this cluster has
                already run.
        """
        if self._has_run:
            raise InvalidArgument("CoupledCluster.run: a cluster must run once, got a second trace")
        self.jobs += jobs_of("CoupledCluster.run", requests)
        self._has_run = True
        for job in self.jobs:
            self.clock.at(job.arrival_s, self._arrive, job)
        self.clock.run()
        return Report(
            self.jobs,
            self.clock.num_events,
            peak_tokens=[instance.peak_tokens for instance in self.instances],
        )

    def _arrive(self, job: Job) -> None:
        request = Request(
            job.job_id,
            job.request.input_length,
            block_size=BLOCK_SIZE,
            max_output_tokens=job.request.output_length,
        )
        job.decision = decision = self._conductor.decide(request, self.clock.now)
        if not decision.accepted:
            job.rejected = decision.reason.why.name
            self._on_progress()
            return
        assert decision.prefill is not None
        self._conductor.commit(decision)
        job.prefill_instance = job.decode_instance = decision.prefill.instance
        self.instances[decision.prefill.instance].arrive(job)

    def _prefilled(self, job: Job) -> None:
        self._conductor.prefilled(job.job_id, self.clock.now)

    def _finish(self, job: Job) -> None:
        self._conductor.decoded(job.job_id)
        self._on_progress()
