"""``serve bench``: a load of streaming completions, and how they were answered."""

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from .status import get_json, headers_of

WORDS = (
    *("cache", "block", "token", "layer", "head", "prompt", "answer", "engine", "router", "queue"),
    *("batch", "chunk", "prefix", "memory", "transfer", "latency", "request", "decode", "share"),
)
PERCENTILES = (50, 90, 99)


@dataclass
class Measured:
    """What became of the requests.

    Attributes:
        ttft_s: of each answer, from the request to the first text.
        tbt_s: between two texts of an answer.
        num_tokens: generated, as the answers say.
        num_cached_tokens: of prompts, likewise.
        refused: requests that have no whole answer, by what was told.
        seconds: from the first request to the last answer.
    """

    ttft_s: list[float] = field(default_factory=list)
    tbt_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_cached_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


def run(options: argparse.Namespace) -> int:
    """Send the load and print what was measured; returns 1 if no request was answered.

    Raises:
        InvalidArgument, ValueError, OSError: see ``get_json`` and ``headers_of``; or no engine is
            up.
    """
    headers = headers_of(options)
    models = get_json(options.url, "/v1/models", headers)["data"]
    if not models:
        raise ConnectionError(f"serve: {options.url}/v1/models: it has none: no engine is up")
    measured = asyncio.run(_load(options, models[0]["id"], headers))
    report = report_of(measured)
    sys.stdout.write((json.dumps(report) if options.json else _text(report)) + "\n")
    return 0 if measured.ttft_s else 1


def report_of(measured: Measured) -> dict[str, Any]:
    """Return numbers, times in milliseconds."""
    seconds = measured.seconds or float("inf")
    return {
        "answered": len(measured.ttft_s),
        "refused": dict(measured.refused),
        "seconds": measured.seconds,
        "requests_per_s": len(measured.ttft_s) / seconds,
        "tokens_per_s": measured.num_tokens / seconds,
        "cached_prompt_tokens": measured.num_cached_tokens,
        "ttft_ms": percentiles(measured.ttft_s),
        "tbt_ms": percentiles(measured.tbt_s),
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return percentiles in milliseconds; none of nothing. Each is one of the values."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return {f"p{p}": 1000 * ordered[round(last * p / 100)] for p in PERCENTILES if ordered}


async def _load(options: argparse.Namespace, model: str, headers: dict[str, str]) -> Measured:
    draw, measured = random.Random(options.seed), Measured()
    shared = draw.choices(WORDS, k=min(options.shared_words, options.words))
    began = time.monotonic()
    timeout = httpx.Timeout(options.timeout)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(
        base_url=options.url, timeout=timeout, limits=limits, headers=headers, trust_env=False
    ) as client:
        tasks: list[asyncio.Future[None]] = []
        for _ in range(options.requests):
            if tasks:
                await asyncio.sleep(draw.expovariate(options.rate))
            own = draw.choices(WORDS, k=options.words - len(shared))
            body = {
                "model": model, "prompt": " ".join([*shared, *own]), "stream": True,
                "stream_options": {"include_usage": True}, "max_tokens": options.max_tokens,
                "ignore_eos": True,
            }  # fmt: skip
            tasks.append(asyncio.ensure_future(_send(client, body, measured)))
        await asyncio.gather(*tasks)
    measured.seconds = time.monotonic() - began
    return measured


async def _send(client: httpx.AsyncClient, body: dict[str, Any], measured: Measured) -> None:
    last_s, times = time.monotonic(), list[float]()
    usage: dict[str, Any] | None = None
    try:
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                measured.refused[_told(answer.status_code, await answer.aread())] += 1
                return
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                event = msgspec.json.decode(line.removeprefix("data: "))
                if "error" in event:
                    measured.refused[f"stream: {event['error'].get('code')}"] += 1
                    return
                usage = event.get("usage") or usage
                if any(choice["text"] for choice in event["choices"]):
                    now_s = time.monotonic()
                    times.append(now_s - last_s)
                    last_s = now_s
    except httpx.HTTPError as error:
        measured.refused[type(error).__name__] += 1
        return
    if usage is None or not times:
        measured.refused["stream: it has no end"] += 1
        return
    measured.ttft_s.append(times[0])
    measured.tbt_s += times[1:]
    measured.num_tokens += usage["completion_tokens"]
    details = usage.get("prompt_tokens_details") or {}
    measured.num_cached_tokens += details.get("cached_tokens") or 0


def _told(status: int, content: bytes) -> str:
    try:
        error = msgspec.json.decode(content)["error"]
        return f"{status} {error['code']}"
    except (msgspec.MsgspecError, KeyError, TypeError):
        return str(status)


def _text(report: dict[str, Any]) -> str:
    lines = [
        f"{report['answered']} answered in {report['seconds']:.1f} s: "
        f"{report['requests_per_s']:.2f} requests/s, {report['tokens_per_s']:.1f} tokens/s, "
        f"{report['cached_prompt_tokens']} prompt tokens from the cache",
    ]
    lines += [f"{count} refused: {why}" for why, count in sorted(report["refused"].items())]
    for name in ("ttft", "tbt"):
        values = "  ".join(f"{p} {ms:.0f}" for p, ms in report[f"{name}_ms"].items())
        lines.append(f"{name.upper()} ms: {values or 'none'}")
    return "\n".join(lines)
