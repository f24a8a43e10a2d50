"""``run``: replay a trace on a cluster of one's own."""

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from ...conductor import (
    AcceptAll,
    Admission,
    Baseline,
    EarlyRejection,
    InvalidArgument,
    KVCacheCentric,
    LoadBalance,
    LocalCacheAware,
    PredictiveRejection,
    Random,
    RoundRobin,
    Slo,
)
from ..caches import POLICIES
from ..conducting import conductor_of
from ..disaggregated import Disaggregated
from ..machines import A800_NODE
from ..options import DisaggregatedOptions, Failure
from ..prefill import PrefillOptions
from ..traces import read_trace, scale_trace

SUMMARY = "Replay a trace on prefill and decode instances under the conductor."
PREFILL_POLICIES = {
    "random": Random,
    "round-robin": RoundRobin,
    "load-balance": LoadBalance,
    "local-cache-aware": LocalCacheAware,
    "kvcache-centric": KVCacheCentric,
}
ADMISSIONS = ("all", "baseline", "early", "predictive")


def add_commands(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("run", help=SUMMARY, description=SUMMARY)
    parser.add_argument("--trace", required=True, help="Mooncake's JSON lines, or a CSV")
    parser.add_argument("--speed", type=float, default=1.0, help="of the replay (default: 1)")
    parser.add_argument("--prefill", type=int, default=8, help="instances (default: 8)")
    parser.add_argument("--decode", type=int, default=8, help="instances (default: 8)")
    parser.add_argument("--policy", default="kvcache-centric", choices=PREFILL_POLICIES)
    parser.add_argument("--admission", default="all", choices=ADMISSIONS)
    parser.add_argument("--ttft", type=float, default=30.0, help="objective, s (default: 30)")
    parser.add_argument("--tbt", type=float, default=0.1, help="objective, s (default: 0.1)")
    parser.add_argument(
        "--decode-s", type=float, help="t_d of --admission predictive (default: 10)"
    )
    parser.add_argument("--group", type=int, default=1, help="nodes a prefill pipeline (CPP)")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens a prefill step")
    parser.add_argument("--dram", type=int, default=3_000_000, help="tokens a prefill instance")
    parser.add_argument("--ssd", type=int, default=0, help="tokens a prefill instance")
    parser.add_argument("--eviction", default="lru", choices=POLICIES)
    parser.add_argument("--gbps", type=float, default=800.0, help="of a node's NICs together")
    parser.add_argument("--event-delay", type=float, default=0.0, help="of KV events, s")
    parser.add_argument(
        "--fail", nargs=3, type=float, action="append", default=[],
        metavar=("INSTANCE", "AT_S", "DOWN_S"), help="prefill instances come first",
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Simulate and print the summary."""
    from .view import View  # needs rich

    for name in ("speed", "gbps"):
        if not getattr(options, name) > 0:
            raise ValueError(f"run: --{name} must be > 0, got {getattr(options, name)}")
    requests = read_trace(options.trace)
    if options.speed != 1:
        requests = scale_trace(requests, time=1 / options.speed)
    cluster = DisaggregatedOptions(
        machine=replace(A800_NODE, nic_bytes_per_s=options.gbps * 1e9 / 8),
        num_prefill=options.prefill,
        num_decode=options.decode,
        prefill=PrefillOptions(chunk_tokens=options.chunk, group_size=options.group),
        dram_tokens=options.dram,
        ssd_tokens=options.ssd,
        eviction=options.eviction,
        event_delay_s=options.event_delay,
        failures=tuple(_failure(*values) for values in options.fail),
    )
    slo = Slo(options.ttft, options.tbt)
    conductor = conductor_of(
        cluster,
        policy=PREFILL_POLICIES[options.policy](),
        admission=_admission(options),
        slo=slo,
        seed=options.seed,
    )
    with View(len(requests), quiet=options.json) as view:
        view.step(options.policy, 1)
        report = Disaggregated(cluster, conductor, on_progress=view.advance).run(requests)
    summary = report.summary() | {"effective": report.num_effective(slo.ttft_s, slo.tbt_s)}
    if options.json:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        title = f"{options.trace}: {options.prefill}P + {options.decode}D, {options.policy}"
        view.summary(title, summary)


def _admission(options: argparse.Namespace) -> Admission:
    if options.decode_s is not None and options.admission != "predictive":
        raise InvalidArgument(
            f"run: --decode-s must come with --admission predictive, got --admission "
            f"{options.admission}"
        )
    if options.admission == "baseline":
        return Baseline()
    if options.admission == "early":
        return EarlyRejection()
    if options.admission == "predictive":
        return PredictiveRejection(decode_s=10.0 if options.decode_s is None else options.decode_s)
    return AcceptAll()


def _failure(instance: float, at_s: float, down_s: float) -> Failure:
    if not instance.is_integer():
        raise InvalidArgument(f"run: --fail must begin with an instance, got {instance:g}")
    return Failure(int(instance), at_s, down_s)
