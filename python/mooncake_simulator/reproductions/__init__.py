"""The papers' figures, one function each: our results next to the published ones."""

from . import (
    arxiv_datasets,
    arxiv_layer_wise,
    arxiv_overload,
    arxiv_policies,
    fast25_cache,
    fast25_capacity,
    fast25_scheduling,
    fast25_sensitivity,
    fast25_sweeps,
    infinite_llm,
    sarathi,
    sarathi_pipeline,
    sarathi_serve,
    staleness,
)
from .outcome import Claim, Curve, Outcome, Panel, Reproduction, Row, Setup, as_lines
from .workloads import SYNTHETIC, TOOLAGENT

ON_A_TRACE: dict[str, Reproduction] = {
    "fast25-fig1": fast25_capacity.conversation_workload,
    "fast25-fig1-sensitivity": fast25_sensitivity.sensitivity,
    "fast25-fig5": fast25_scheduling.fast25,
    "fast25-fig9": fast25_cache.hit_rate_over_capacity,
    "fast25-fig11": fast25_cache.replicas,
    "fast25-global-cache": fast25_cache.global_cache,
    "arxiv-fig8": fast25_scheduling.arxiv,
    "arxiv-real": fast25_capacity.real_workload,
    "arxiv-overload": arxiv_overload.overload,
    "arxiv-overload-sensitivity": arxiv_overload.sensitivity,
    "arxiv-policies": arxiv_policies.policies,
    "staleness": staleness.staleness,
}
ALONE: dict[str, Reproduction] = {
    "arxiv-datasets": arxiv_datasets.datasets,
    "arxiv-fig7": arxiv_layer_wise.layer_wise,
    "fast25-fig6": fast25_capacity.toolagent_workload,
    "fast25-fig7": fast25_capacity.synthetic_workload,
    "fast25-fig13": fast25_sweeps.bandwidth,
    "fast25-fig15": fast25_sweeps.ratio,
    "fast25-fig14": fast25_sweeps.breakdown,
    "sarathi-tiles": sarathi.tiles,
    "sarathi-pd-peak": sarathi.pd_peak,
    "sarathi-bubbles": sarathi_pipeline.bubbles,
    "sarathi-serve-table4": sarathi_serve.table4,
    "infinite-llm": infinite_llm.pooling,
}
REPRODUCTIONS = ON_A_TRACE | ALONE
NEEDS_TRACE = frozenset(ON_A_TRACE)
# Those whose published figures are of FAST'25's conversation trace.
ON_CONVERSATION = frozenset(name for name in ON_A_TRACE if name.startswith("fast25-"))
# Which of FAST'25's other workloads they replay.
USES: dict[str, tuple[str, ...]] = {
    "fast25-fig6": (TOOLAGENT,),
    "fast25-fig7": (SYNTHETIC,),
    "fast25-fig9": (SYNTHETIC, TOOLAGENT),
    "fast25-fig11": (SYNTHETIC,),
    "fast25-fig13": (SYNTHETIC,),
    "fast25-fig15": (SYNTHETIC,),
    "fast25-global-cache": (TOOLAGENT, SYNTHETIC),
}

__all__ = [
    "NEEDS_TRACE",
    "ON_CONVERSATION",
    "REPRODUCTIONS",
    "USES",
    "Claim",
    "Curve",
    "Outcome",
    "Panel",
    "Reproduction",
    "Row",
    "Setup",
    "as_lines",
]
