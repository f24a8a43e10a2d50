"""``stat``: what a pool reports, once."""

import argparse
import dataclasses
import json
import sys
from functools import partial
from typing import Any

from .options import add_command, add_token, add_trust, open_pool
from .sample import Source

WHERE_HELP = "file of the pool, or http://host:port of its admin server"


def add_commands(commands: Any) -> None:
    """Declare the command."""
    parser = add_command(commands, "stat", run, "Show a pool's numbers.", "stat /dev/shm/kv --json")
    parser.add_argument("where", metavar="PATH|URL", help=WHERE_HELP)
    parser.add_argument("--json", action="store_true", help="one object")
    add_token(parser)
    add_trust(parser)


def run(options: argparse.Namespace) -> None:
    sample = Source(options.where, options.token, partial(open_pool, options)).sample()
    counts = {**dataclasses.asdict(sample.counts), "hit_rate": sample.counts.hit_rate}
    if options.json:
        numbers = {**sample.gauges, **counts, **sample.ssd}
        json.dump({"pool": sample.pool, **{n: _whole(x) for n, x in numbers.items()}}, sys.stdout)
        sys.stdout.write("\n")
        return
    from .view import as_table, console  # needs rich

    console().print(as_table(sample))


def _whole(number: Any) -> Any:
    """An integer where it is one: gauges of Prometheus are floats."""
    return int(number) if isinstance(number, float) and number.is_integer() else number
