"""``serve bench``: from its options to its report."""

import argparse
import asyncio
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..status import get_json, headers_of
from .figures import WIDTH, details_of, figures_of, text_of
from .load import Loader, Progress
from .predict import SimulatedCluster, predict
from .request import Answer, body_of
from .workload import Workload, workload_of


def run(options: argparse.Namespace) -> int:
    """Send the load, and print and write what was measured; returns 1 if nothing was answered.

    Raises:
        InvalidArgument, ValueError, OSError: see ``get_json`` and ``headers_of``; an option is
            wrong, no model is served, or a file cannot be read or written.
        MissingExtra: a picture is wanted, and matplotlib is missing.
    """
    goodput_ms = dict(options.goodput)
    if options.output_png or options.output_html:
        from . import picture  # first: matplotlib may be missing
    for path in filter(None, (options.output_json, options.output_png, options.output_html)):
        Path(path).open("a").close()  # it can be written
    headers = headers_of(options)
    model = options.model or served_model(options.url, headers)
    workload = workload_of(options)
    if options.simulate:
        _told(options, headers)  # fails before the measurement, not after it
    answers, duration_s = asyncio.run(_measure(options, model, workload, headers))

    def describe(those: Sequence[Answer], seconds: float) -> dict[str, Any]:
        return figures_of(
            those, seconds, goodput_ms=goodput_ms, percentiles=options.metric_percentiles
        )

    figures = describe(answers, duration_s)
    content = _setting(options, model, workload) | figures
    runs, tables = {"measured": answers}, {"measured": figures}
    if options.simulate:
        simulated, cluster = _simulate(options, headers, workload, answers)
        runs["simulated"] = simulated
        end_s = max(one.started_s + one.latency_s for one in simulated)
        tables["simulated"] = describe(simulated, end_s)
        content["simulated"] = {**cluster, **tables["simulated"]}
    if options.json:
        sys.stdout.write(json.dumps(content) + "\n")
    else:
        for label, table in tables.items():
            sys.stdout.write(f"{f' {label} '.center(WIDTH, '=')}\n{text_of(table)}\n")
    if options.output_json:
        lists = {name: details_of(those) for name, those in runs.items()}
        whole = content | lists.pop("measured")
        if lists:
            whole["simulated"] = content["simulated"] | lists["simulated"]
        Path(options.output_json).write_text(json.dumps(whole, indent=1) + "\n")
    if options.output_png or options.output_html:
        figure = picture.draw(runs, goodput_ms)
        if options.output_html:
            page = picture.page_of(figure, f"{model} at {options.url}", tables)
            Path(options.output_html).write_text(page, encoding="utf-8")
        if options.output_png:
            picture.save_png(figure, options.output_png)
    return 0 if figures["completed"] else 1


def served_model(url: str, headers: Mapping[str, str]) -> str:
    """Ask a server for its first model.

    Raises:
        InvalidArgument: what is no URL.
        ConnectionError: nothing answers there as OpenAI's API does, or it serves no model.
    """
    listed = get_json(url, "/v1/models", dict(headers))
    try:
        names = [one["id"] for one in listed["data"]]
    except (TypeError, KeyError):
        raise ConnectionError(f"serve: {url}/v1/models: it lists no models") from None
    if not names:
        raise ConnectionError(f"serve: {url}/v1/models: it has none: no engine is up")
    return str(names[0])


async def _measure(
    options: argparse.Namespace, model: str, workload: Workload, headers: Mapping[str, str]
) -> tuple[list[Answer], float]:
    bodies = [
        body_of(
            options.endpoint, model, one.token_ids, one.output_len, ignore_eos=options.ignore_eos
        )
        for one in workload.requests
    ]
    loader = Loader(options.url, headers, options.endpoint, options.timeout)
    await loader.one_by_one([bodies[i % len(bodies)] for i in range(options.num_warmups)])
    return await loader.all(
        bodies,
        [len(one.token_ids) for one in workload.requests],
        [one.at_s for one in workload.requests],
        max_concurrency=options.max_concurrency,
        progress=Progress(len(bodies), sys.stderr),
    )


def _setting(options: argparse.Namespace, model: str, workload: Workload) -> dict[str, Any]:
    rate = options.request_rate
    return {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "model_id": model,
        "base_url": options.url,
        "endpoint": options.endpoint,
        "num_prompts": len(workload.requests),
        "request_rate": rate if math.isfinite(rate) else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "seed": options.seed,
        "trace": options.trace,
        "speed": options.speed,
        "scale_lengths": options.scale_lengths,
        "goodput": dict(options.goodput),
    }


def _simulate(
    options: argparse.Namespace,
    headers: Mapping[str, str],
    workload: Workload,
    answers: Sequence[Answer],
) -> tuple[list[Answer], dict[str, Any]]:
    """Predict the same requests, sent when they were; returns also what the simulator knew."""
    cluster = _told(options, headers)
    sent = [
        replace(one, timestamp_ms=1000 * answer.started_s)
        for one, answer in zip(workload.as_trace(), answers, strict=True)
    ]
    return predict(cluster, sent, workload.block_size), {"cluster": cluster.as_dict()}


def _told(options: argparse.Namespace, headers: Mapping[str, str]) -> SimulatedCluster:
    instances = get_json(options.url, "/instances", dict(headers))
    decisions = get_json(options.url, "/decisions?limit=1000", dict(headers))
    return SimulatedCluster.of(instances, decisions)
