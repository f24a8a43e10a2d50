"""The clusters that are compared in several reproductions."""

from collections.abc import Sequence

from mooncake_serving.conductor import Admission, PrefillPolicy, Slo

from ..conducting import NO_LIMIT, conductor_of
from ..coupled_cluster import CoupledCluster, CoupledClusterOptions
from ..coupled_options import Batching, CoupledOptions
from ..disaggregated import Disaggregated
from ..machines import A800_NODE, LLAMA3_70B, Machine, Model
from ..options import DisaggregatedOptions
from ..report import Report
from ..traces import TraceRequest
from .outcome import Setup

# vLLM 0.5.1, as FAST'25 compares with: its three modes, with its defaults. Long whole prompts are
# alone in a step: its limit of tokens per step is the model's context length.
VLLM = {
    "vLLM": CoupledOptions(),
    "vLLM prefix caching": CoupledOptions(use_cache=True),
    "vLLM chunked prefill": CoupledOptions(batching=Batching.CHUNKED),
}


def serve(
    setup: Setup,
    options: DisaggregatedOptions,
    *,
    trace: Sequence[TraceRequest] | None = None,
    policy: PrefillPolicy | None = None,
    admission: Admission | None = None,
    slo: Slo = NO_LIMIT,
) -> Report:
    """Replay the trace on a disaggregated cluster.

    Raises:
        ValueError: not one of its requests is served.
    """
    conductor = conductor_of(options, policy=policy, admission=admission, slo=slo, seed=setup.seed)
    cluster = Disaggregated(options, conductor, on_progress=setup.on_progress)
    return _served(cluster.run(setup.trace if trace is None else trace))


def serve_coupled(
    setup: Setup,
    engine: CoupledOptions,
    *,
    num_instances: int = 16,
    machine: Machine = A800_NODE,
    model: Model = LLAMA3_70B,
    policy: PrefillPolicy | None = None,
) -> Report:
    """Replay the trace on coupled instances; by default each request goes to the shortest queue.

    Raises:
        ValueError: not one of its requests is served.
    """
    options = CoupledClusterOptions(
        model=model, machine=machine, num_instances=num_instances, engine=engine
    )
    cluster = CoupledCluster(options, policy, on_progress=setup.on_progress, seed=setup.seed)
    return _served(cluster.run(setup.trace))


def gain(ours: Report, theirs: Report, ttft_s: float, tbt_s: float) -> float:
    """Return by how many percent ours serves more requests within both limits."""
    num_theirs = max(1, theirs.num_effective(ttft_s, tbt_s))
    return 100 * (ours.num_effective(ttft_s, tbt_s) / num_theirs - 1)


def _served(report: Report) -> Report:
    if not len(report.ttft_s):
        raise ValueError(
            "a trace must hold requests that the cluster can serve, "
            f"got none served of {len(report.jobs)}"
        )
    return report
