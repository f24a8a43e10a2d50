"""``fast25-fig1`` and the others: one command for each figure of a paper."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..reproductions import NEEDS_TRACE, ON_CONVERSATION, REPRODUCTIONS, USES, Setup, as_lines
from ..reproductions.workloads import SYNTHETIC, TOOLAGENT
from ..traces import TraceProfile, TraceRequest, read_trace, synth_trace
from . import arguments
from .view import make_view


def add_commands(commands: Any) -> None:
    """Declare a command for each reproduction."""
    for name, reproduction in REPRODUCTIONS.items():
        summary = (reproduction.__doc__ or "").partition("\n")[0]
        parser = commands.add_parser(name, help=summary.replace("%", "%%"), description=summary)
        if name in NEEDS_TRACE:
            source = parser.add_mutually_exclusive_group(required=True)
            what = "FAST'25's conversation trace" if name in ON_CONVERSATION else "to replay"
            source.add_argument("--trace", help=f"{what}: Mooncake's JSON lines")
            source.add_argument("--profile", help="of a trace to make up, by trace synth")
            parser.add_argument(
                "--requests", type=int, metavar="N", help="only the first N, or that many made up"
            )
        if SYNTHETIC in USES.get(name, ()):
            source = parser.add_mutually_exclusive_group(required=True)
            source.add_argument("--synthetic", metavar="TRACE", help="the released synthetic trace")
            source.add_argument(
                "--synthetic-profile",
                metavar="PROFILE",
                help="of that trace, to make one up: tests/simulator/synthetic.profile.json",
            )
        if TOOLAGENT in USES.get(name, ()):
            parser.add_argument(
                "--toolagent",
                metavar="TRACE",
                help="the released toolagent trace; without it one like it is made up",
            )
        parser.add_argument("--out", metavar="FOLDER", help="for NAME.jsonl and NAME.png")
        parser.add_argument(
            "--seed", type=arguments.seed, default=0, help="of what is random (default: 0)"
        )
        parser.add_argument("--json", action="store_true", help="print JSON lines, nothing else")
        parser.set_defaults(run=run, reproduction=name)


def run(options: argparse.Namespace) -> None:
    """Reproduce, print our figures next to the published ones, and save both."""
    name = options.reproduction
    view = make_view(quiet=options.json)
    folder = arguments.folder(options.out)
    requests, trace_name = _trace(options) if name in NEEDS_TRACE else ([], "")
    paths = {workload: getattr(options, workload) for workload in USES.get(name, ())}
    released = {workload: read_trace(path) for workload, path in paths.items() if path is not None}
    profile = getattr(options, "synthetic_profile", None)
    with view:
        setup = Setup(
            trace=requests,
            trace_name=trace_name,
            on_simulation=view.step,
            on_progress=view.advance,
            seed=options.seed,
            released=released,
            synthetic_profile=None if profile is None else TraceProfile.load(profile),
        )
        outcome = REPRODUCTIONS[name](setup)
    lines = [json.dumps(line) + "\n" for line in as_lines(name, outcome)]
    if options.json:
        sys.stdout.writelines(lines)
    else:
        view.outcome(outcome)
    if folder is not None:
        from ..plot import save_plot  # needs matplotlib

        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        save_plot(outcome, folder / f"{name}.png")


def _trace(options: argparse.Namespace) -> tuple[list[TraceRequest], str]:
    if options.requests is not None and options.requests < 1:
        raise ValueError(f"--requests must be at least 1, got {options.requests}")
    if options.trace is not None:
        return read_trace(options.trace)[: options.requests], Path(options.trace).name
    profile = TraceProfile.load(options.profile)
    made_up = synth_trace(profile, options.requests or 1000, seed=options.seed)
    return made_up, f"made up by {Path(options.profile).name}"
