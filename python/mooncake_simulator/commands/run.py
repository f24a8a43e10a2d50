"""``run``: replay a trace on a cluster with chosen options."""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mooncake_serving.conductor import (
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
from ..coupled_cluster import CoupledCluster, CoupledClusterOptions
from ..disaggregated import Disaggregated
from ..machines import A800_NODE, LLAMA3_70B, MACHINES, MODELS
from ..options import DisaggregatedOptions, Failure
from ..prefill import PrefillOptions
from ..reproductions.clusters import VLLM
from ..traces import read_trace, scale_trace
from . import arguments, per_request
from .view import make_view

SUMMARY = "Replay a trace on prefill and decode instances under the conductor, or on coupled ones."
PREFILL_POLICIES = {
    "random": Random,
    "round-robin": RoundRobin,
    "load-balance": LoadBalance,
    "local-cache-aware": LocalCacheAware,
    "kvcache-centric": KVCacheCentric,
}
# The conductor does not know what coupled instances have cached.
COUPLED_POLICIES = ("random", "round-robin", "load-balance")
ADMISSIONS = ("all", "baseline", "early", "predictive")
MODES = {
    "plain": VLLM["vLLM"],
    "prefix-caching": VLLM["vLLM prefix caching"],
    "chunked-prefill": VLLM["vLLM chunked prefill"],
}
# Options that do not apply to coupled instances, and their defaults.
DISAGGREGATED_ONLY: dict[str, Any] = {
    "admission": "all",
    "decode_s": None,  # DECODE_S, if predictive admission needs it
    "group": 1,
    "chunk": 4096,
    "dram": None,  # that of the machine
    "ssd": 0,
    "eviction": "lru",
    "gbps": None,  # that of the machine
    "event_delay": 0.0,
    "fail": [],
}
DECODE_S = 10.0

Cluster = Disaggregated | CoupledCluster
MakeCluster = Callable[[Callable[[], None]], Cluster]


def add_commands(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("run", help=SUMMARY, description=SUMMARY)
    parser.add_argument("--trace", required=True, help="Mooncake's JSON lines, or a CSV")
    parser.add_argument("--speed", type=float, default=1.0, help="of the replay (default: 1)")
    parser.add_argument(
        "--model", default=LLAMA3_70B.name, choices=MODELS, help="default: %(default)s"
    )
    parser.add_argument(
        "--machine", default=A800_NODE.name, choices=MACHINES, help="default: %(default)s"
    )
    parser.add_argument("--prefill", type=int, default=8, help="instances (default: 8)")
    parser.add_argument("--decode", type=int, default=8, help="instances (default: 8)")
    parser.add_argument(
        "--max-batch-size", type=int, default=256, help="requests decoded at once (default: 256)"
    )
    parser.add_argument(
        "--coupled", choices=MODES,
        help="on as many instances as --prefill and --decode together, each of which does both",
    )  # fmt: skip
    parser.add_argument(
        "--policy", choices=PREFILL_POLICIES,
        help="default: kvcache-centric; load-balance if --coupled",
    )  # fmt: skip
    parser.add_argument("--ttft", type=float, default=30.0, help="objective, s (default: 30)")
    parser.add_argument("--tbt", type=float, default=0.1, help="objective, s (default: 0.1)")
    parser.add_argument("--seed", type=arguments.seed, default=0, help="default: 0")
    parser.add_argument(
        "--out", metavar="FOLDER", help="for run.jsonl, a line for each request, and run.png"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")

    own = parser.add_argument_group("of prefill and decode instances, not of coupled ones")
    own.add_argument("--admission", choices=ADMISSIONS, help="default: all")
    own.add_argument("--decode-s", type=float, help="t_d of predictive admission (default: 10)")
    own.add_argument("--group", type=int, help="nodes a prefill pipeline (CPP; default: 1)")
    own.add_argument("--chunk", type=int, help="tokens a prefill step (default: 4,096)")
    own.add_argument("--dram", type=int, help="tokens a prefill instance (default: the machine's)")
    own.add_argument("--ssd", type=int, help="tokens a prefill instance (default: 0)")
    own.add_argument("--eviction", choices=POLICIES, help="default: lru")
    own.add_argument(
        "--gbps", type=float, help="of a node's NICs together (default: the machine's)"
    )
    own.add_argument("--event-delay", type=float, help="of KV events, s (default: 0)")
    own.add_argument(
        "--fail", nargs=3, type=float, action="append",
        metavar=("INSTANCE", "AT_S", "DOWN_S"), help="prefill instances come first",
    )  # fmt: skip
    parser.set_defaults(run=run, **DISAGGREGATED_ONLY)


def run(options: argparse.Namespace) -> None:
    """Simulate, print the summary, and save the result of each request."""
    for name in ("speed", "gbps"):
        if getattr(options, name) is not None and not getattr(options, name) > 0:
            raise ValueError(f"run: --{name} must be > 0, got {getattr(options, name)}")
    view = make_view(quiet=options.json)
    folder = arguments.folder(options.out)
    slo = Slo(options.ttft, options.tbt)
    make, name = _coupled(options) if options.coupled else _disaggregated(options, slo)
    requests = read_trace(options.trace)
    if options.speed != 1:
        requests = scale_trace(requests, time=1 / options.speed)
    with view:
        view.step(name, 1, len(requests))
        report = make(view.advance).run(requests)
    summary = report.summary() | {"effective": report.num_effective(slo.ttft_s, slo.tbt_s)}
    title = f"{options.trace}: {name}"
    if options.json:
        sys.stdout.write(json.dumps(summary) + "\n")
    else:
        view.summary(title, summary)
    if folder is not None:
        from ..plot import save_panels  # needs matplotlib

        with (folder / "run.jsonl").open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in per_request.lines(report))
        save_panels(title, per_request.panels(report), folder / "run.png")


def _disaggregated(options: argparse.Namespace, slo: Slo) -> tuple[MakeCluster, str]:
    model, machine = MODELS[options.model], MACHINES[options.machine]
    machine.kv_capacity_tokens(model)  # it must fit
    if options.gbps is not None:
        machine = replace(machine, nic_bytes_per_s=options.gbps * 1e9 / 8)
    dram_tokens = options.dram
    if dram_tokens is None:
        dram_tokens = int(machine.dram_bytes / model.kv_bytes_per_token)
    # The papers' single GPUs have neither; an invented value would be silent.
    for name, value in (("gbps", machine.nic_bytes_per_s), ("dram", dram_tokens)):
        if getattr(options, name) is None and not value:
            raise ValueError(f"run: --{name} must be given with --machine {machine.name}, got none")
    cluster = DisaggregatedOptions(
        model=model,
        machine=machine,
        num_prefill=options.prefill,
        num_decode=options.decode,
        prefill=PrefillOptions(chunk_tokens=options.chunk, group_size=options.group),
        dram_tokens=dram_tokens,
        ssd_tokens=options.ssd,
        eviction=options.eviction,
        max_batch_size=options.max_batch_size,
        event_delay_s=options.event_delay,
        failures=tuple(_failure(*values) for values in options.fail),
    )
    policy = options.policy or "kvcache-centric"
    conductor = conductor_of(
        cluster,
        policy=PREFILL_POLICIES[policy](),
        admission=_admission(options),
        slo=slo,
        seed=options.seed,
    )

    def make(on_progress: Callable[[], None]) -> Disaggregated:
        return Disaggregated(cluster, conductor, on_progress=on_progress)

    return make, f"{options.prefill}P + {options.decode}D, {policy}"


def _coupled(options: argparse.Namespace) -> tuple[MakeCluster, str]:
    for name, default in DISAGGREGATED_ONLY.items():
        if getattr(options, name) != default:
            option = name.replace("_", "-")
            value = getattr(options, name)
            raise ValueError(f"run: --{option} must be left out with --coupled, got {value}")
    for name in ("prefill", "decode"):
        if getattr(options, name) < 0:
            raise ValueError(f"run: --{name} must be at least 0, got {getattr(options, name)}")
    policy = options.policy or "load-balance"
    if policy not in COUPLED_POLICIES:
        raise ValueError(
            f"run: --policy must be one of {', '.join(COUPLED_POLICIES)} with --coupled, "
            f"got {policy}"
        )
    cluster = CoupledClusterOptions(
        model=MODELS[options.model],
        machine=MACHINES[options.machine],
        num_instances=options.prefill + options.decode,
        engine=replace(MODES[options.coupled], max_batch_size=options.max_batch_size),
    )

    def make(on_progress: Callable[[], None]) -> CoupledCluster:
        rule = PREFILL_POLICIES[policy]()
        return CoupledCluster(cluster, rule, on_progress=on_progress, seed=options.seed)

    return make, f"{cluster.num_instances} coupled ({options.coupled}), {policy}"


def _admission(options: argparse.Namespace) -> Admission:
    if options.admission == "predictive":
        return PredictiveRejection(
            decode_s=DECODE_S if options.decode_s is None else options.decode_s
        )
    if options.decode_s is not None:
        raise ValueError(
            f"run: --decode-s must be given with --admission predictive, got {options.admission}"
        )
    if options.admission == "baseline":
        return Baseline()
    if options.admission == "early":
        return EarlyRejection()
    return AcceptAll()


def _failure(instance: float, at_s: float, down_s: float) -> Failure:
    if not instance.is_integer():
        raise InvalidArgument(f"run: --fail must begin with an instance, got {instance:g}")
    return Failure(int(instance), at_s, down_s)
