"""The options of ``serve bench``, without what it needs to run."""

import argparse
import math
from typing import Any

from ..number_option import number

GOODPUT = ("ttft", "tpot", "e2el")
ENDPOINTS = ("/v1/completions", "/v1/chat/completions")


def add_options(parser: Any) -> None:
    """Declare them, but ``--url`` and ``--api-key-file``."""
    _add_load(parser)
    _add_prompts(parser)
    _add_trace(parser)
    _add_results(parser)


def _add_load(parser: Any) -> None:
    count, positive = number(int, 1), number(float, 1e-6)
    parser.add_argument("--model", metavar="NAME", help="(default: the first that is served)")
    parser.add_argument(
        "--endpoint", choices=ENDPOINTS, default=ENDPOINTS[0],
        help="to chats prompts are sent as words, otherwise as token ids (default: "
        f"{ENDPOINTS[0]})",
    )  # fmt: skip
    parser.add_argument(
        "--num-prompts", type=count, metavar="N", help="(default: 32; of a trace all)"
    )
    parser.add_argument(
        "--request-rate", type=positive, default=math.inf, metavar="R",
        help="requests a second at random times (default: all at once, as far as "
        "--max-concurrency lets them)",
    )  # fmt: skip
    parser.add_argument(
        "--burstiness", type=positive, default=1.0, metavar="B",
        help="of these times, the shape of a gamma distribution: 1 is a Poisson process, less is "
        "more bursty, more is more even (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--max-concurrency", "--concurrency", type=count, metavar="N",
        help="requests under way at once; alone, a closed loop of so many clients (default: no "
        "limit)",
    )  # fmt: skip
    parser.add_argument(
        "--num-warmups", type=number(int, 0), default=0, metavar="N",
        help="requests before, one after the other, which are not measured (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--timeout", type=positive, default=120.0, metavar="SECONDS",
        help="after which a silent answer has failed (default: 120)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=number(int, 0), default=0, metavar="N",
        help="of prompts and times (default: 0)",
    )  # fmt: skip


def _add_prompts(parser: Any) -> None:
    count = number(int, 1)
    parser.add_argument(
        "--random-input-len", type=count, default=64, metavar="N",
        help="tokens of a prompt behind what all have in common (default: 64)",
    )  # fmt: skip
    parser.add_argument(
        "--random-prefix-len", type=number(int, 0), default=0, metavar="N",
        help="tokens at the beginning that all prompts have in common (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--random-output-len", type=count, default=32, metavar="N",
        help="tokens of an answer (default: 32)",
    )  # fmt: skip
    parser.add_argument(
        "--token-ids", type=_token_ids, default=(32, 256), metavar="FIRST:END",
        help="of prompts, END excluded; every model should know them (default: 32:256)",
    )  # fmt: skip
    parser.add_argument(
        "--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
        help="have answers go on to their full length; not every endpoint takes it (default: on)",
    )  # fmt: skip


def _add_trace(parser: Any) -> None:
    positive = number(float, 1e-6)
    parser.add_argument(
        "--trace", metavar="FILE",
        help="replay Mooncake's JSON lines: prompts of its lengths at its times, with equal tokens "
        "where hash_ids are equal",
    )  # fmt: skip
    parser.add_argument(
        "--speed", type=positive, default=1.0, metavar="X",
        help="of its clock: 2 sends twice as many requests a second (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--scale-lengths", type=positive, default=1.0, metavar="X",
        help="of its prompts, blocks and answers: 0.03125 makes blocks of 16 tokens of those of "
        "512 (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--scale-outputs", type=positive, metavar="X",
        help="of its answers (default: --scale-lengths)",
    )  # fmt: skip


def _add_results(parser: Any) -> None:
    parser.add_argument(
        "--goodput", type=_objective, nargs="+", default=[], metavar="FIGURE:MS",
        help="objectives in milliseconds, as ttft:500 tpot:50 (also e2el): count the requests that "
        "meet all of them",
    )  # fmt: skip
    parser.add_argument(
        "--metric-percentiles", type=_percentiles, default=(99.0,), metavar="P,...",
        help="besides mean and median (default: 99)",
    )  # fmt: skip
    parser.add_argument(
        "--simulate", action="store_true",
        help="also predict the run: the simulator, with the costs that our router has fitted",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--output-json", metavar="FILE", help="write JSON with the times of each request"
    )
    parser.add_argument("--output-png", metavar="FILE", help="write a picture")
    parser.add_argument(
        "--output-html", metavar="FILE", help="write a report that needs no other file"
    )


def _token_ids(text: str) -> tuple[int, int]:
    first, _, end = text.partition(":")
    if not (_is_count(first) and _is_count(end) and int(first) < int(end)):
        raise argparse.ArgumentTypeError(f"must be FIRST:END, FIRST below END, got {text!r}")
    return int(first), int(end)


def _objective(text: str) -> tuple[str, float]:
    name, _, milliseconds = text.partition(":")
    if name not in GOODPUT:
        raise argparse.ArgumentTypeError(
            f"must be one of {', '.join(GOODPUT)} with milliseconds, as ttft:500, got {text!r}"
        )
    return name, number(float, 0)(milliseconds)


def _percentiles(text: str) -> tuple[float, ...]:
    return tuple(number(float, 0, 100)(part) for part in text.split(","))


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10
