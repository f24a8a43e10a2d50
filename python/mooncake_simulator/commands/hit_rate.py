"""``hit-rate``: what caches of some capacities save on a trace."""

import argparse
import json
import sys
from typing import Any

from ..caches import OFFLINE, POLICIES
from ..hit_rate import HitRate, replay
from ..traces import BLOCK_SIZE, InvalidTrace, read_mooncake, reader_of

SUMMARY = "Replay a trace against one pool of blocks; print hit tokens over input tokens."


def add_commands(commands: Any) -> None:
    """Declare the command."""
    parser = commands.add_parser("hit-rate", help=SUMMARY, description=SUMMARY)
    parser.add_argument("--trace", required=True, help="Mooncake's JSON lines")
    parser.add_argument(
        "--capacity", nargs="+", type=_capacity, required=True, metavar="TOKENS",
        help="of the pool, several for as many replays; inf: no limit",
    )  # fmt: skip
    parser.add_argument(
        "--policy", default="lru", choices=[*POLICIES, *OFFLINE], help="what leaves (default: lru)"
    )
    parser.add_argument(
        "--block-tokens", type=_block_tokens, default=BLOCK_SIZE, metavar="TOKENS",
        help=f"of a hash id in the trace (default: {BLOCK_SIZE})",
    )  # fmt: skip
    parser.add_argument(
        "--warm-up", type=float, default=0.0, metavar="SHARE",
        help="of the requests, whose hits are not counted (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true",
        help='print one JSON object a capacity; no limit is the string "inf", as JSON has no such '
        "number",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Replay and print, one line per capacity."""
    if reader_of(options.trace) is not read_mooncake:
        what = "must be Mooncake's JSON lines, got a CSV, which does not say what prompts share"
        raise InvalidTrace(options.trace, 1, what)
    # Whether an id always follows the same one does not matter for a cache of ids.
    requests = list(
        read_mooncake(options.trace, block_size=options.block_tokens, check_prefixes=False)
    )
    if not requests:
        raise InvalidTrace(options.trace, 1, "a trace must hold at least one request")
    if not options.json:
        sys.stdout.write(f"{'capacity':>15} {'hit rate':>9} {'of input':>14}\n")
    for capacity in options.capacity:
        result = replay(
            requests,
            capacity,
            policy=options.policy,
            block_tokens=options.block_tokens,
            warm_up=options.warm_up,
        )
        sys.stdout.write(_line(result, options) + "\n")
        sys.stdout.flush()


def _line(result: HitRate, options: argparse.Namespace) -> str:
    unlimited = result.capacity_tokens == float("inf")
    if not options.json:
        capacity = "inf" if unlimited else f"{result.capacity_tokens:,.0f}"
        return f"{capacity:>15} {result.hit_rate:>9.4f} {result.input_tokens:>14,}"
    return json.dumps(
        {
            "capacity_tokens": "inf" if unlimited else int(result.capacity_tokens),
            "hit_rate": result.hit_rate,
            "hit_tokens": result.hit_tokens,
            "input_tokens": result.input_tokens,
            "policy": options.policy,
        }
    )


def _capacity(text: str) -> float:
    try:
        capacity = float(text)
    except ValueError:
        capacity = -1.0
    if not capacity >= 0:
        raise argparse.ArgumentTypeError(f"must be a number of tokens, or inf, got {text!r}")
    return capacity


def _block_tokens(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {text!r}")
    return int(text)
