"""``top``: a pool, live."""

import argparse
import sys
import time
from functools import partial
from typing import Any

from mooncake_kernels.errors import InvalidArgument

from .options import add_command, add_token, add_trust, as_seconds, open_pool
from .sample import Source
from .stat import WHERE_HELP


def add_commands(commands: Any) -> None:
    """Declare the command."""
    parser = add_command(
        commands, "top", run, "Watch a pool: capacity, hit rate, rates, evictions.",
        "top /dev/shm/kv --interval 2",
    )  # fmt: skip
    parser.add_argument("where", metavar="PATH|URL", help=WHERE_HELP)
    parser.add_argument(
        "--interval",
        type=as_seconds,
        default=1.0,
        metavar="SECONDS",
        help="between looks (default: 1)",
    )
    parser.add_argument("--once", action="store_true", help="print two looks' difference, and end")
    add_token(parser)
    add_trust(parser)


def run(options: argparse.Namespace) -> None:
    from rich.live import Live

    from .view import as_table, console

    source = Source(options.where, options.token, partial(open_pool, options))
    before = source.sample()
    if options.once:
        time.sleep(options.interval)
        console().print(as_table(source.sample(), before))
        return
    if not sys.stdout.isatty():
        raise InvalidArgument("top: standard output must be a terminal, or --once be given")
    with Live(as_table(before), console=console(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(options.interval)
            now = source.sample()
            live.update(as_table(now, before), refresh=True)
            before = now
