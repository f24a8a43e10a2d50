"""A discrete-event simulation of a cluster, and the traces that it replays.

Example:
    >>> from mooncake_simulator import *
    >>> options = DisaggregatedOptions(num_prefill=8, num_decode=8)
    >>> report = Disaggregated(options, conductor_of(options)).run(read_trace("trace.jsonl"))
    >>> report.summary()["ttft_mean_s"], report.num_effective(ttft_s=30, tbt_s=0.1)

Every decision is the conductor's (:mod:`mooncake_serving.conductor`); the only rules of the
simulator's own are the batches of coupled engines. ``docs/serving/reproduction.md`` lists what it
reproduces.
"""

from .conducting import conductor_of, fit_costs
from .coupled_cluster import CoupledCluster, CoupledClusterOptions
from .coupled_options import Batching, CoupledOptions
from .disaggregated import Disaggregated
from .hit_rate import HitRate, replay
from .machines import Machine, Model
from .options import DisaggregatedOptions, Failure
from .prefill import PrefillOptions
from .report import Report
from .step_cost import StepCost
from .traces import TraceRequest, read_trace

__all__ = [
    "Batching",
    "CoupledCluster",
    "CoupledClusterOptions",
    "CoupledOptions",
    "Disaggregated",
    "DisaggregatedOptions",
    "Failure",
    "HitRate",
    "Machine",
    "Model",
    "PrefillOptions",
    "Report",
    "StepCost",
    "TraceRequest",
    "conductor_of",
    "fit_costs",
    "read_trace",
    "replay",
]
