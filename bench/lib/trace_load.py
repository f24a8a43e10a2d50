"""A trace as a load: Mooncake's, or one generated from the profile of the tests, scaled down."""

import argparse
import contextlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from lib.harness import at_least
from mooncake_serving.__main__ import main
from mooncake_simulator.traces import (
    TraceProfile,
    TraceRequest,
    read_trace,
    synth_trace,
    write_mooncake,
)

PROFILE = Path(__file__).parents[2] / "tests/simulator/conversation.profile.json"
SCALE = 16 / 512  # of lengths: a block of the trace becomes one of 16 tokens


def add_options(parser: argparse.ArgumentParser, requests: int) -> None:
    """Add the options of the load; ``requests`` is how many a run has by default."""
    parser.add_argument("--trace", help="Mooncake's JSON lines")
    parser.add_argument("--requests", type=at_least(8), default=requests, help="of each run")
    parser.add_argument("--scale-outputs", type=at_least(0.001, float), default=0.25)


def write_trace(options: argparse.Namespace, file: Path) -> list[TraceRequest]:
    """Write the trace that options ask for, and return its requests."""
    if options.trace:
        requests = read_trace(options.trace)[: options.requests]
    else:
        requests = synth_trace(TraceProfile.load(PROFILE), options.requests)
    write_mooncake(requests, file)
    return requests


def replay(url: str, trace: Path, options: argparse.Namespace, *more: str) -> dict[str, Any]:
    """Send a trace by ``serve bench``, and return what it writes, with the times of each request.

    Args:
        url: of the server.
        trace: its file.
        options: of the bench.
        more: further options of ``serve bench``.
    """
    with tempfile.NamedTemporaryFile("r", suffix=".json") as file:
        with contextlib.redirect_stdout(sys.stderr):
            main([
                "serve", "bench", f"--url={url}", f"--trace={trace}", f"--scale-lengths={SCALE}",
                f"--scale-outputs={options.scale_outputs}", f"--output-json={file.name}", *more,
            ])  # fmt: skip
        return json.load(file)
