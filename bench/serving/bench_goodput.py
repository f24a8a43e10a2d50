"""Goodput: prefill and decode apart, engines that do both, and vLLM, on the same cores and trace.

Two processes, each on a core of its own, behind our router: an engine that prefills and one that
decodes; two engines that do both; and two of vLLM's servers. All have the same model, a Llama of
random weights in the form of SmolLM2-135M with `--layers` of its 30 layers, the same memory for
keys and values, and the same schedule: 512 tokens a step, 128 of them of one prompt. The router and
the load are not pinned, so on two cores they compete with the engines.

The load is a trace whose lengths are scaled so that a block is 16 tokens, at random times (a
Poisson process). The rate begins at one request in the time that one takes alone, and rises by
`--step` until no system holds. At each rate the systems take turns, `--repeat` rounds, each with
tokens that none of them has seen.

A request holds if its TTFT is within `--ttft` times, and its TBT within `--tbt` times, what a
request alone takes on average: that of the fastest system, in this run. 10 and 5 are those of
Mooncake (arXiv 2407.00079, section 8.1). In a row `within` is the share of requests that hold, with
TBT as the mean of a request; `within_p90` has the 90th percentile of its gaps instead. The goodput
is the highest rate before the first one at which less than 90 % hold (DistServe, arXiv 2401.09670).

`--vllm` is a Python with vLLM (tests/serving/in_vllm/make_vllm makes one). Without it there are the
first two. `--trace` is Mooncake's conversation trace; without it requests are generated from the
profile of the tests.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib

from lib import trace_load
from lib.harness import arguments, at_least
from lib.model_folder import CONTEXT, SMOLLM2, write_model
from lib.processes import family, free_port, pin
from lib.serve_up import serve_up
from lib.table import heading, save
from mooncake_serving.serve.children import Child, Port

BLOCK, NUM_BLOCKS = 32, 1024  # vLLM's kernel for processors takes blocks of 32 tokens
STEP_TOKENS, CHUNK_TOKENS, MAX_REQUESTS = 512, 128, 64
ALONE = 24  # requests, one after the other
HOLDS = 0.9  # of the requests, at least
MAX_RATES = 20
OURS = {"apart": ("--prefill=1", "--decode=1"), "both": ("--both=2",)}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
    "VLLM_HOST_IP": "127.0.0.1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
LOOK_S, LIMIT_S = 0.2, 900.0


class Objectives(NamedTuple):
    """Within which a request holds, in seconds."""

    ttft_s: float
    tbt_s: float


class Run(NamedTuple):
    """What ``serve bench`` has told of a system at a rate; lists have an entry for each request."""

    duration_s: float
    ttfts: list[float]
    tbts: list[float]  # means; 0: of one token
    p90_gaps: list[float]
    errors: list[str]

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> "Run":
        gaps = told["itls"]
        spans = zip(told["latencies"], told["ttfts"], told["output_lens"], strict=True)
        return cls(
            told["duration"],
            told["ttfts"],
            [(last - first) / max(1, count - 1) for last, first, count in spans],
            [float(np.percentile(one, 90)) if one else 0.0 for one in gaps],
            told["errors"],
        )

    def num_within(self, objectives: Objectives, *, by_p90: bool = False) -> int:
        """Count the requests that hold; one without a whole answer does not."""
        tbts = self.p90_gaps if by_p90 else self.tbts
        return sum(
            not error and ttft <= objectives.ttft_s and tbt <= objectives.tbt_s
            for ttft, tbt, error in zip(self.ttfts, tbts, self.errors, strict=True)
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    trace_load.add_options(parser, requests=40)
    parser.set_defaults(repeat=2)
    parser.add_argument("--vllm", default=os.environ.get("MK_TEST_VLLM"), help="a Python")
    parser.add_argument("--layers", type=at_least(1), default=4, help="of the model")
    parser.add_argument("--ttft", type=at_least(1, float), default=10.0, help="times that alone")
    parser.add_argument("--tbt", type=at_least(1, float), default=5.0, help="times that alone")
    parser.add_argument("--step", type=at_least(1.01, float), default=1.5, help="between rates")


def cores_of(options: argparse.Namespace) -> list[set[int]]:
    """Return where the two processes of a system run: apart, if there are cores for it."""
    cores = sorted(os.sched_getaffinity(0))
    own = [set(cores[i * options.threads : (i + 1) * options.threads]) for i in range(2)]
    return own if len(own[1]) == options.threads else [set(cores)] * 2


@contextlib.contextmanager
def our_engines(
    name: str, model: Path, options: argparse.Namespace, cores: Sequence[Collection[int]]
) -> Iterator[str]:
    """Start our engines by ``serve up``, and yield the router's URL."""
    with serve_up(
        model, *OURS[name], f"--num-blocks={NUM_BLOCKS}", f"--block-size={BLOCK}",
        f"--chunk-tokens={CHUNK_TOKENS}", f"--max-requests={MAX_REQUESTS}",
        f"--threads={options.threads}",
    ) as up:  # fmt: skip
        engines = [pid for pid in family(up.pid) if is_engine(pid)]
        for pid, own in zip(engines, cores, strict=True):
            pin(pid, own)
        yield up.url


def is_engine(pid: int) -> bool:
    """Tell an engine from what else ``serve up`` runs."""
    return b"\0serve\0engine\0" in Path(f"/proc/{pid}/cmdline").read_bytes()


@contextlib.contextmanager
def vllm_engines(
    model: Path, options: argparse.Namespace, cores: Sequence[Collection[int]]
) -> Iterator[str]:
    """Start two of vLLM's servers and our router in front of them, and yield its URL."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mooncake-vllm-")))
        lines = ['connector = "mooncake_kernels"', f"block_size = {BLOCK}"]
        urls = []
        for index, own in enumerate(cores):
            port, events, replay = free_port(), free_port(), free_port()
            urls.append(f"http://127.0.0.1:{port}")
            lines += [
                "[[instance]]", f'name = "vllm-{index}"', 'role = "both"', f'url = "{urls[-1]}"',
                f'events = "tcp://127.0.0.1:{events}"', f'replay = "tcp://127.0.0.1:{replay}"',
                'topic = "kv"',
            ]  # fmt: skip
            publish = {
                "enable_kv_cache_events": True, "publisher": "zmq", "topic": "kv",
                "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}",
            }  # fmt: skip
            told = {"port": port, "kv-events-config": json.dumps(publish)}
            log = folder / f"vllm-{index}.log"
            stack.enter_context(vllm_server(urls[-1], model, options, told, own, log))
        (folder / "router.toml").write_text("\n".join(lines) + "\n")
        arguments = ["router", "--config", str(folder / "router.toml")]
        listening = Port("bench", "127.0.0.1", 0)
        stack.callback(listening.close)
        router = Child("router", arguments, listening, os.environ, sys.stderr)
        stack.callback(router.kill)
        wait_until_up(router.url, router.poll)
        yield router.url


@contextlib.contextmanager
def vllm_server(
    url: str,
    model: Path,
    options: argparse.Namespace,
    told: Mapping[str, Any],
    cores: Collection[int],
    log: Path,
) -> Iterator[None]:
    """Start a server of vLLM on these cores, with these options in addition, and end it."""
    every = {
        "model": model, "served-model-name": "llama", "dtype": "float32", "host": "127.0.0.1",
        "block-size": BLOCK, "kv-cache-memory-bytes": kv_bytes(options), "max-model-len": CONTEXT,
        "max-num-seqs": MAX_REQUESTS, "max-num-batched-tokens": STEP_TOKENS,
        "long-prefill-token-threshold": CHUNK_TOKENS, **told,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in every.items()]
    with log.open("w") as output:
        process = subprocess.Popen(
            [options.vllm, "-m", "vllm.entrypoints.openai.api_server", *words],
            stdout=output, stderr=output, start_new_session=True,
            env=os.environ | ENVIRONMENT | {"OMP_NUM_THREADS": str(options.threads)},
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
    try:
        wait_until_up(url, lambda: None if process.poll() is None else log.read_text()[-2000:])
        yield
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started
        process.wait()


def kv_bytes(options: argparse.Namespace) -> int:
    """Return the bytes of an engine's keys and values."""
    return NUM_BLOCKS * BLOCK * options.layers * 2 * SMOLLM2.kv_heads * SMOLLM2.head_dim * 4


def wait_until_up(url: str, ended: Callable[[], str | None]) -> None:
    """Wait until a server is healthy.

    Args:
        url: of the server.
        ended: returns how it has ended; None: it has not.

    Raises:
        RuntimeError: it has ended, or LIMIT_S have passed.
    """
    until = time.monotonic() + LIMIT_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", timeout=LIMIT_S, trust_env=False).status_code == 200:
                return
        if (how := ended()) is not None:
            raise RuntimeError(f"the server at {url} has ended: {how}")
        if time.monotonic() > until:
            raise RuntimeError(f"the server at {url} must be up within {LIMIT_S:g} s")
        time.sleep(LOOK_S)


def check_equal(urls: Mapping[str, str]) -> None:
    """Compare what the systems answer to a prompt.

    Raises:
        RuntimeError: their greedy tokens differ.
    """
    texts = {}
    for name, url in urls.items():
        model = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"][0]["id"]
        body = {
            "model": model, "prompt": [*range(32, 132)], "max_tokens": 16, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_S, trust_env=False)
        answer.raise_for_status()
        texts[name] = answer.json()["choices"][0]["text"]
    if len(set(texts.values())) > 1:
        raise RuntimeError(f"the systems must answer alike, got {texts}")


def row_of(name: str, rate: float, runs: Sequence[Run], objectives: Objectives) -> dict[str, Any]:
    """Return a row: all rounds of a system at a rate."""
    sent = sum(len(one.ttfts) for one in runs)
    done = [
        (ttft, tbt)
        for one in runs
        for ttft, tbt, error in zip(one.ttfts, one.tbts, one.errors, strict=True)
        if not error
    ]
    row: dict[str, Any] = {
        "case": f"{name}, {rate:.2f} requests/s", "system": name, "rate": rate, "requests": sent,
        "completed": len(done), **objectives._asdict(),
    }  # fmt: skip
    for key, by_p90 in (("within", False), ("within_p90", True)):
        held = [one.num_within(objectives, by_p90=by_p90) for one in runs]
        row[key] = sum(held) / sent
        row[f"{key}_rounds"] = [n / len(one.ttfts) for n, one in zip(held, runs, strict=True)]
        row[f"good_per_s_{key}"] = sum(held) / sum(one.duration_s for one in runs)
    for index, key in enumerate(("ttft", "tbt")):
        for percentile in (50, 90) if done else ():
            value = np.percentile([one[index] for one in done], percentile)
            row[f"{key}_p{percentile}_ms"] = 1000 * float(value)
    return row


def goodput(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    """Return the highest rate before the first one that does not hold; 0: none does.

    Args:
        rows: of a system, in the order of their rates.
        key: of the share of requests that hold.
    """
    highest = 0.0
    for row in rows:
        if row[key] < HOLDS:
            break
        highest = row["rate"]
    return highest


def line(row: Mapping[str, Any]) -> str:
    """Return one row of the table."""
    times = ", ".join(
        f"{key.upper()} {row[f'{key}_p50_ms']:.0f}, P90 {row[f'{key}_p90_ms']:.0f} ms"
        for key in ("ttft", "tbt")
        if f"{key}_p50_ms" in row
    )
    return (
        f"{row['case']:28} within {100 * row['within']:3.0f} %, by the P90 of gaps "
        f"{100 * row['within_p90']:3.0f} %, {row['good_per_s_within']:.2f} good/s   {times}\n"
    )


def measure(
    urls: Mapping[str, str], trace: Path, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the rows: of the systems by rates, then each one's goodput."""

    def run(name: str, *more: str) -> dict[str, Any]:
        return trace_load.replay(urls[name], trace, options, "--timeout=300", *more)

    few = f"--num-prompts={min(ALONE, options.requests)}"
    alone = {name: run(name, few, "--concurrency=1", "--num-warmups=2") for name in urls}
    for name, told in alone.items():
        if told["failed"]:
            raise RuntimeError(f"{name} has failed requests: {told['not_answered']}")
    objectives = Objectives(
        options.ttft * min(told["mean_ttft_ms"] for told in alone.values()) / 1000,
        options.tbt * min(told["mean_tpot_ms"] for told in alone.values()) / 1000,
    )
    yield {
        "case": "alone", **objectives._asdict(),
        **{f"ttft_{name}_ms": told["mean_ttft_ms"] for name, told in alone.items()},
        **{f"tbt_{name}_ms": told["mean_tpot_ms"] for name, told in alone.items()},
    }  # fmt: skip
    rate = 1000 / min(told["mean_e2el_ms"] for told in alone.values())
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in urls}
    standing = [*urls]
    for index in range(1 if options.quick else MAX_RATES):
        runs: dict[str, list[Run]] = {name: [] for name in standing}
        for number in range(options.repeat):
            first = number % len(standing)
            load = (f"--request-rate={rate}", f"--seed={1 + index * options.repeat + number}")
            for name in [*standing[first:], *standing[:first]]:
                runs[name].append(Run.of(run(name, *load)))
        for name in standing:
            rows[name].append(row_of(name, rate, runs[name], objectives))
            yield rows[name][-1]
        standing = [
            name
            for name in standing
            if max(rows[name][-1]["within"], rows[name][-1]["within_p90"]) >= HOLDS
        ]
        if not standing:
            break
        rate *= options.step
    for name, those in rows.items():
        yield {
            "case": f"goodput of {name}", "system": name, **objectives._asdict(),
            "goodput": goodput(those, "within"), "goodput_p90": goodput(those, "within_p90"),
            "is_bounded": name not in standing,
        }  # fmt: skip


def show(row: Mapping[str, Any]) -> str:
    if "within" in row:
        return line(row)
    numbers = [f"{name} {value:.3g}" for name, value in row.items() if isinstance(value, float)]
    return f"{row['case']}: {', '.join(numbers)}\n"


def run(options: argparse.Namespace, folder: Path) -> None:
    head, rows, left_out = heading("goodput", options), [], []
    write_model(folder, SMOLLM2._replace(layers=options.layers))
    trace = folder / "trace.jsonl"
    trace_load.write_trace(options, trace)
    cores = cores_of(options)
    with ExitStack() as stack:
        urls = {
            name: stack.enter_context(our_engines(name, folder, options, cores)) for name in OURS
        }
        if options.vllm:
            urls["vllm"] = stack.enter_context(vllm_engines(folder, options, cores))
        else:
            left_out = [{"case": "vllm", "left_out": "--vllm names no Python with vLLM"}]
        check_equal(urls)
        for row in measure(urls, trace, options):
            rows.append(row)
            sys.stdout.write(show(row))
            sys.stdout.flush()
            save(head, rows, options, left_out)


if __name__ == "__main__":
    chosen = arguments(__doc__, add_options, without=("device", "seconds"))
    if chosen.quick:
        chosen.requests, chosen.layers = min(chosen.requests, 8), min(chosen.layers, 2)
        chosen.scale_outputs = min(chosen.scale_outputs, 0.05)
        chosen.repeat, chosen.vllm = 1, None
    with tempfile.TemporaryDirectory(prefix="mooncake-goodput-") as name:
        run(chosen, Path(name))
