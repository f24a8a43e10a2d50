"""``serve up``: a cluster on this machine, or on the nodes of Ray's, by one command."""

import argparse
import json
import logging
import shlex
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import NoReturn

from mooncake_kernels.errors import InvalidArgument

from .children import default_threads
from .cluster import LOOK_S, LocalCluster
from .options import check_semantic

ENGINE_OPTIONS = (
    "model", "name", "device", "dtype", "num_blocks", "block_size", "max_requests", "max_waiting",
    "chunk_tokens", "store",
)  # fmt: skip
OF_RAY = ("ray_address", "num_cpus", "num_gpus")


def run(options: argparse.Namespace) -> int:
    """Start the cluster, and keep it up until Ctrl-C, SIGTERM or SIGHUP; returns the exit status.

    Raises:
        InvalidArgument: no engine is asked for, or there are options of Ray without it; or see
            ``LocalCluster``.
        ConnectionError: there is no such Ray cluster.
        StartFailed: a process has ended before the cluster was ready.
    """
    logging.basicConfig(level=logging.INFO, format="serve: %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    check_semantic("serve up", options)
    roles = _roles(options)
    cluster_of = _cluster_of(options)
    signals_as_ctrl_c()
    try:
        with cluster_of(
            roles,
            engine_arguments(options, [*roles.values()]),
            host=options.host,
            port=options.port,
            block_size=options.block_size,
            admission=admission_of(options),
            output=sys.stderr,
        ) as cluster:
            cluster.wait_until_ready()
            sys.stdout.write(_ready(cluster.url, cluster.model(), roles))
            sys.stdout.flush()
            stay(cluster)
    except KeyboardInterrupt:
        return 0


def signals_as_ctrl_c() -> None:
    """Have SIGTERM and SIGHUP, unless they are ignored, as by nohup, raise KeyboardInterrupt."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def stay(cluster: LocalCluster) -> NoReturn:
    """Keep a cluster up, until Ctrl-C."""
    while True:
        cluster.supervise()
        time.sleep(LOOK_S)


def _roles(options: argparse.Namespace) -> dict[str, str]:
    default = 0 if options.both else 1
    counts = {
        "prefill": default if options.prefill is None else options.prefill,
        "decode": default if options.decode is None else options.decode,
        "both": options.both,
    }
    if not options.both and not (counts["prefill"] and counts["decode"]):
        raise InvalidArgument(
            "serve up: --prefill and --decode must be at least 1 without --both, "
            f"got {counts['prefill']} and {counts['decode']}"
        )
    return {f"{role}-{i}": role for role, count in counts.items() for i in range(count)}


def admission_of(options: argparse.Namespace) -> dict[str, str | float]:
    """Return the entries of the router's ``[admission]``."""
    given: dict[str, str | float] = {"rule": options.admission, "decode_s": options.decode_s}
    objectives = {"ttft_s": options.ttft_s, "tbt_s": options.tbt_s}
    return given | {name: value for name, value in objectives.items() if value is not None}


def _cluster_of(options: argparse.Namespace) -> Callable[..., LocalCluster]:
    """Return what makes the cluster."""
    if options.cluster == "ray":
        from .ray_cluster import RayCluster  # of an extra of its own

        num_gpus = options.num_gpus
        if num_gpus is None:
            num_gpus = 0 if options.device == "cpu" else 1
        of_ray = {"address": options.ray_address, "num_cpus": options.num_cpus or 1}
        return partial(RayCluster, **of_ray, num_gpus=num_gpus)
    for name in OF_RAY:
        if (value := getattr(options, name)) is not None:
            option = f"--{name.replace('_', '-')}"
            raise InvalidArgument(
                f"serve up: {option} must be left out without --cluster ray, got {value}"
            )
    return LocalCluster


def engine_arguments(options: argparse.Namespace, roles: Sequence[str]) -> dict[str, list[str]]:
    """Return the options of ``serve engine``, by the role.

    Args:
        options: of the command.
        roles: of all engines, whose processes share the processors.
    """
    num_processes = {role: 1 if role == "decode" else options.pipeline for role in roles}
    share = default_threads(sum(num_processes[role] for role in roles))
    if options.cluster == "ray":
        share = options.num_cpus or 1
    threads = options.threads or share
    given = {name: getattr(options, name) for name in ENGINE_OPTIONS} | {"threads": threads}
    arguments = [
        f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None
    ]
    arguments += ["--batch-invariant"] * options.batch_invariant
    semantic = {role: 0 if role == "decode" else options.semantic_blocks for role in num_processes}
    return {
        role: [*arguments, f"--pipeline={n}", f"--semantic-blocks={semantic[role]}"]
        for role, n in num_processes.items()
    }


def _ready(url: str, model: str, roles: dict[str, str]) -> str:
    """Return what is told when all are ready, with a command to paste."""
    message = {"role": "user", "content": "What is a cache? Answer in one sentence."}
    body = json.dumps({"model": model, "messages": [message], "max_tokens": 64, "stream": True})
    return (
        f"serve: ready at {url}: {model} by {', '.join(roles)}\n\n"
        f"curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"    -d {shlex.quote(body)}\n\n"
    )


def _interrupt(signal_number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
