"""``trace stats | scale | synth``: examine a trace, change it, generate one."""

import argparse
import json
import sys
from typing import Any

from ..traces import (
    TraceProfile,
    TraceRequest,
    read_trace,
    scale_trace,
    synth_trace,
    trace_stats,
    unshared,
    write_mooncake,
)
from . import arguments

SUMMARY = "Describe a trace, scale it, or make one up that looks like it."


def add_commands(commands: Any) -> None:
    """Declare the commands."""
    group = commands.add_parser("trace", help=SUMMARY, description=SUMMARY)
    tools = group.add_subparsers(dest="tool", required=True, metavar="TOOL")

    stats = tools.add_parser("stats", help="lengths, arrivals, and how much prefixes are shared")
    stats.add_argument("trace", help="Mooncake's JSON lines, Azure's or BurstGPT's CSV")
    stats.add_argument("--json", action="store_true", help="print one JSON object")
    stats.set_defaults(run=_stats)

    scale = tools.add_parser("scale", help="stretch the clock, multiply the requests")
    scale.add_argument("trace", help="Mooncake's JSON lines, Azure's or BurstGPT's CSV")
    scale.add_argument("out", help="where to write the new one, as JSON lines")
    scale.add_argument("--time", type=float, default=1.0, help="0.5: twice as fast (default: 1)")
    scale.add_argument("--load", type=float, default=1.0, help="2: two copies (default: 1)")
    scale.add_argument("--seed", type=arguments.seed, default=0, help="of which requests are kept")
    scale.set_defaults(run=_scale)

    synth = tools.add_parser("synth", help="make a trace up, by another one or its profile")
    like = synth.add_mutually_exclusive_group(required=True)
    like.add_argument("--like", metavar="TRACE", help="which it shall look like")
    like.add_argument("--profile", metavar="FILE", help="of such a trace, by --save-profile")
    synth.add_argument("out", nargs="?", help="where to write it, as JSON lines")
    synth.add_argument("--requests", type=int, default=1000, metavar="N", help="default: 1000")
    synth.add_argument("--seed", type=arguments.seed, default=0, help="default: 0")
    synth.add_argument("--save-profile", metavar="FILE", help="keep what is known of the trace")
    synth.set_defaults(run=_synth)


def load_profile(like: str | None, profile: str | None) -> TraceProfile:
    """Read a profile, or make it from a trace."""
    if profile is not None:
        return TraceProfile.load(profile)
    assert like is not None
    return TraceProfile.of(_with_ids(read_trace(like)), source=like)


def _with_ids(requests: list[TraceRequest]) -> list[TraceRequest]:
    return requests if requests[0].hash_ids else list(unshared(requests))


def _stats(options: argparse.Namespace) -> None:
    stats = trace_stats(read_trace(options.trace))
    sys.stdout.write((json.dumps(stats.as_dict()) if options.json else str(stats)) + "\n")


def _scale(options: argparse.Namespace) -> None:
    requests = _with_ids(read_trace(options.trace))
    scaled = scale_trace(requests, time=options.time, load=options.load, seed=options.seed)
    if not scaled:
        raise ValueError(
            f"trace scale: --load must leave at least one of {len(requests)} requests, "
            f"got {options.load:g}"
        )
    write_mooncake(scaled, options.out)
    sys.stdout.write(f"{len(scaled)} requests in {options.out}\n")


def _synth(options: argparse.Namespace) -> None:
    if options.out is None and options.save_profile is None:
        raise ValueError("trace synth: OUT or --save-profile must be given, got neither")
    if options.requests < 1:
        raise ValueError(f"trace synth: --requests must be at least 1, got {options.requests}")
    profile = load_profile(options.like, options.profile)
    if options.save_profile is not None:
        profile.save(options.save_profile)
    if options.out is not None:
        requests = synth_trace(profile, options.requests, seed=options.seed)
        write_mooncake(requests, options.out)
        sys.stdout.write(f"{len(requests)} requests in {options.out}\n")
