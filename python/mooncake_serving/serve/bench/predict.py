"""What the simulator predicts of a run, with the costs that our router has fitted to its engines.

The cluster has the router's engines, rule and objectives, and the requests come when they were
sent. Its caches are empty at first. A prefill engine takes one prompt after the other, and a prompt
is where it is decoded as soon as it is computed; the time that this takes in truth, until the first
token comes, is added to each: the median that the router has seen.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec

from mooncake_kernels.errors import InvalidArgument
from mooncake_serving.conductor import (
    Cluster,
    Conductor,
    Costs,
    LinearDecode,
    LocalCacheAware,
    NicTransfer,
    PolynomialPrefill,
    PrefixIndex,
    Role,
)
from mooncake_serving.router.config import AdmissionConfig
from mooncake_serving.router.placement import admission_rule, slo_of
from mooncake_simulator import Disaggregated, DisaggregatedOptions
from mooncake_simulator.job import Job
from mooncake_simulator.measured_cost import FAST, MeasuredCost
from mooncake_simulator.traces import TraceRequest

from .request import Answer

OP = "serve bench"
MOST_BLOCKS = 2**31


class _Instance(msgspec.Struct):
    role: str
    up: bool
    capacity_tokens: int


class _Prefill(msgspec.Struct):
    base_s: float
    per_token_s: float
    per_pair_s: float
    source: str


class _Decode(msgspec.Struct):
    base_s: float
    per_request_s: float
    per_kv_token_s: float
    source: str


class _Costs(msgspec.Struct):
    prefill: _Prefill
    decode: _Decode


class _Admission(msgspec.Struct):
    rule: str
    decode_s: float
    ttft_s: float | None = None
    tbt_s: float | None = None


class _Told(msgspec.Struct):
    instances: list[_Instance]
    costs: _Costs
    admission: _Admission


@dataclass(frozen=True)
class SimulatedCluster:
    """What a router tells of its engines, for the simulator.

    Attributes:
        prefill, decode: costs; ``sources``: how the router knows them, of each.
        num_prefill, num_decode: engines that are up.
        capacity_tokens: of the smallest.
        admission: the router's rule and objectives.
        handover_s: from the end of a prefill to the first token.
    """

    prefill: PolynomialPrefill
    decode: LinearDecode
    sources: tuple[str, str]
    num_prefill: int
    num_decode: int
    capacity_tokens: int
    admission: AdmissionConfig
    handover_s: float

    @classmethod
    def of(cls, instances: Any, decisions: Any) -> "SimulatedCluster":
        """Read what a router answers at ``/instances`` and ``/decisions``.

        Raises:
            InvalidArgument: it is no router of ours, or has no prefill and decode engines up.
        """
        try:
            told = msgspec.convert(instances, _Told)
        except msgspec.ValidationError as error:
            raise InvalidArgument(
                f"{OP}: --simulate must be given with the --url of our router, got another's: "
                f"{error}"
            ) from None
        up = [one for one in told.instances if one.up]
        num_prefill, num_decode = (sum(one.role == r for one in up) for r in ("prefill", "decode"))
        if not (num_prefill and num_decode) or num_prefill + num_decode < len(up):
            raise InvalidArgument(
                f"{OP}: --simulate must be given for engines that prefill and engines that decode, "
                f"got {', '.join(one.role for one in up) or 'none'}"
            )
        costs, rule = told.costs, told.admission
        return cls(
            PolynomialPrefill(
                costs.prefill.base_s, costs.prefill.per_token_s, costs.prefill.per_pair_s
            ),
            LinearDecode(
                costs.decode.base_s, costs.decode.per_request_s, costs.decode.per_kv_token_s
            ),
            (costs.prefill.source, costs.decode.source),
            num_prefill,
            num_decode,
            min(one.capacity_tokens for one in up),
            AdmissionConfig(
                ttft_s=math.inf if rule.ttft_s is None else rule.ttft_s,
                tbt_s=math.inf if rule.tbt_s is None else rule.tbt_s,
                rule=rule.rule,
                decode_s=rule.decode_s,
            ),
            _handover_s(decisions),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all of it as JSON has it."""
        rule = asdict(self.admission)
        objectives = {name: _finite(rule[name]) for name in ("ttft_s", "tbt_s")}
        return {
            "num_prefill": self.num_prefill,
            "num_decode": self.num_decode,
            "capacity_tokens": self.capacity_tokens,
            "prefill": {**asdict(self.prefill), "source": self.sources[0]},
            "decode": {**asdict(self.decode), "source": self.sources[1]},
            "admission": {"rule": rule["rule"], "decode_s": rule["decode_s"], **objectives},
            "handover_s": self.handover_s,
        }


def predict(
    cluster: SimulatedCluster, requests: Sequence[TraceRequest], block_size: int
) -> list[Answer]:
    """Simulate requests, and return their answers, in the same order.

    Args:
        cluster: that serves them.
        requests: in any order of times.
        block_size: tokens that one of their hash ids stands for.
    """
    capacity = min(cluster.capacity_tokens, MOST_BLOCKS)
    cost = MeasuredCost(cluster.prefill, cluster.decode, capacity)
    options = DisaggregatedOptions(
        model=cost.model,
        machine=cost.machine,
        num_prefill=cluster.num_prefill,
        num_decode=cluster.num_decode,
        dram_tokens=capacity,
        block_size=block_size,
    )
    roles = [Role.PREFILL] * cluster.num_prefill + [Role.DECODE] * cluster.num_decode
    transfer = NicTransfer(cost.model.kv_bytes_per_token, FAST)
    conductor = Conductor(
        Cluster(roles, capacity_tokens=capacity),
        PrefixIndex(len(roles)),
        Costs(cluster.prefill, cluster.decode, transfer),
        slo_of(cluster.admission),
        policy=LocalCacheAware(),
        admission=admission_rule(cluster.admission, chooses_decode=False),
    )
    order = sorted(range(len(requests)), key=lambda index: requests[index].timestamp_ms)
    jobs = Disaggregated(options, conductor, cost=cost).run([requests[i] for i in order]).jobs
    answers = [_answer(job, cluster.handover_s) for job in jobs]
    return [answer for _, answer in sorted(zip(order, answers, strict=True), key=lambda p: p[0])]


def _answer(job: Job, handover_s: float) -> Answer:
    request = job.request
    answer = Answer(job.arrival_s, request.input_length)
    if job.rejected is not None:
        answer.error, answer.is_refused = f"429 overloaded {job.rejected}", True
        if job.ttft_s is not None:
            answer.decision = {"prefilled_s": f"{job.ttft_s:.4f}"}
        return answer
    assert job.ttft_s is not None and job.finished_s is not None
    answer.ttft_s = job.ttft_s + handover_s
    answer.latency_s = job.finished_s - job.arrival_s + handover_s
    answer.itl_s = job.gaps_s().tolist()
    answer.output_len, answer.cached_len = request.output_length, job.prefix_tokens
    return answer


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def _handover_s(decisions: Any) -> float:
    seen = [
        one["first_byte_s"] - one["prefilled_s"]
        for one in decisions.get("decisions", ())
        if "first_byte_s" in one and "prefilled_s" in one
    ]
    return max(0.0, statistics.median(seen)) if seen else 0.0
