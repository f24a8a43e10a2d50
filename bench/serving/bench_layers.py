"""What of a prompt's transfer is left when it is computed: blocks that move layer by layer.

A Llama of random weights in the form of SmolLM2-135M (30 layers, 46 KB a token, float32), on one
host, in servers' workers as `serve engine` has them. All figures of a row are of one run, in turn.

Hand-off: a prompt is prefilled in chunks, and received by a decode engine in another process. In a
row `us` is the time from the end of the last chunk's computation until the decode engine may begin;
`whole` is the time of the same transfer when all is computed before it is asked for, and `percent`
the first of the second; it is below 0 if that is before the prefill engine has chosen its token.
`by_chunks` is the first if a chunk leaves as a whole, when its step has ended. `x_prefill` is how
many times as fast the prefill is with either as with none under way.

Store: a prompt's first tokens are loaded from a `shm:` store, and the rest is computed. `us` is the
time to the first token, with the time of a load in front of it (`us_whole`), of a prompt in the
engine's own cache (`us_own`), and without any (`us_cold`). `hidden` is the share of the load's time
in which the engine has not waited for it; `x_cold` and `x_own` are how many times as fast a hit in
the store, and in the own cache, is as none.
"""

import argparse
import asyncio
import random
import statistics
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib

import mooncake_kernels as mk
from lib.harness import arguments, spread
from lib.processes import new_processes
from lib.table import heading, save
from mooncake_serving.connectors.handoff import HandoffSettings, Source
from mooncake_serving.engine import (
    Engine,
    LayerHooks,
    Llama,
    ModelConfig,
    PagedKVCache,
    SamplingParams,
)
from mooncake_serving.engine.rope import inverse_frequencies
from mooncake_serving.engine.weights import LayerWeights, Weights
from mooncake_serving.serve.job import Fetch, Job, Send
from mooncake_serving.serve.stored_blocks import StoredBlocks
from mooncake_serving.serve.transfers import SETTINGS, Transfers
from mooncake_serving.serve.worker import Parts, Worker

BLOCK = 16  # tokens
FIRST = SamplingParams(max_tokens=1, temperature=0)
WAIT_S = 600.0


def random_llama(num_layers: int) -> Llama:
    """The form of SmolLM2-135M, with weights that every process draws alike."""
    config = ModelConfig(
        num_layers=num_layers,
        hidden_size=576,
        ffn_size=1536,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        vocab_size=4096,
        max_position=8192,
        rms_eps=1e-5,
        rope_theta=1e4,
    )
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5

    hidden, ffn = config.hidden_size, config.ffn_size
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    ones = torch.ones(hidden)
    layers = tuple(
        LayerWeights(
            *(ones, matrix(qkv, hidden), matrix(hidden, hidden)),
            *(ones, matrix(2 * ffn, hidden), matrix(hidden, ffn)),
        )
        for _ in range(num_layers)
    )
    embedding = matrix(config.vocab_size, hidden) * hidden**0.5
    frequencies = inverse_frequencies(config)
    return Llama(
        config, Weights(embedding, layers, ones, matrix(len(embedding), hidden), frequencies)
    )


class LoadedFirst(StoredBlocks):
    """Computes a prompt when all of it has been loaded: what layer by layer is compared with."""

    def load(self, job: Job, block_ids: list[int], num_cached_tokens: int) -> None:
        super().load(job, block_ids, num_cached_tokens)
        self._loads[job].waits_for_end = True


class Server:
    """An engine's worker, and the loop on which its answers arrive.

    With ``stored``, what is behind the engine's cache, it loads and does not save.

    Attributes:
        by_chunks: whether prompts leave when a step has ended.
        step_ended_s: when the last step has ended.
        came_s: when the last prompt from another engine, or from the store, could be computed.
        load_began_s: when the store was last asked.
        waited_s: how long layers have waited for it.
    """

    def __init__(
        self, model: Llama, num_blocks: int, chunk_tokens: int, *, role: str = "both",
        transports: list[str] | None = None, store: str = "", stored: type | None = None,
    ):  # fmt: skip
        self.by_chunks, self._waiting = False, None
        self.step_ended_s = self.came_s = self.load_began_s = self.waited_s = 0.0
        self.worker = Worker(
            partial(self._make, model, num_blocks, chunk_tokens, role, transports, store, stored),
            max_waiting=1024,
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.worker.start(self._loop, lambda: None)

    def _make(self, model, num_blocks, chunk_tokens, role, transports, store, stored, on_step):
        def hooks(work: Any) -> LayerHooks | None:
            made = on_step(work)
            if made is None or made.before_attention is None:
                return made
            return LayerHooks(partial(self._wait, made.before_attention), made.after_write)

        cache = PagedKVCache(model.config, num_blocks, block_size=BLOCK)
        engine = Engine(
            model, cache, max_batch_tokens=max(512, chunk_tokens), chunk_tokens=chunk_tokens,
            keep_prefixes=True, on_step=hooks,
        )  # fmt: skip
        engine.step = partial(self._timed_step, engine.step)
        transfers = blocks = None
        if role != "both":
            token_bytes = cache.num_bytes // num_blocks // BLOCK
            settings = HandoffSettings(max(SETTINGS.slot_bytes, 2 * chunk_tokens * token_bytes))
            transfers = Transfers(
                *(engine, mk.TransferEngine(transports=transports)),
                sends=role == "prefill",
                receives=role == "decode",
                model="random",
                settings=settings,
            )
            transfers.poll = partial(self._timed_poll, transfers.poll)
            self._computed = transfers.computed
            transfers.computed = self._send
        if store:
            blocks = (stored or StoredBlocks)(store, "random", engine)
            blocks.poll = partial(self._timed_poll, blocks.poll)
            blocks.load = partial(self._timed_load, blocks.load)
            if stored is None:
                engine.allocator.on_change = blocks.changed
        return Parts(engine, transfers, blocks, similar=None, group=None)

    def _timed_step(self, step: Any) -> Any:
        outputs = step()
        self.step_ended_s = time.perf_counter()
        if self._waiting is not None:
            self._computed(*self._waiting)
            self._waiting = None
        return outputs

    def _send(self, job: Job, send: Send, block_ids: list[int], *computed: int) -> None:
        if not self.by_chunks:
            self._computed(job, send, block_ids, *computed)
        elif computed[-1] == self.worker.engine.cache.num_layers:
            self._waiting = (job, send, [*block_ids], *computed)  # the list is emptied at the end

    def _timed_poll(self, poll: Any) -> Any:
        if came := poll():
            self.came_s = time.perf_counter()
        return came

    def _timed_load(self, load: Any, *arguments: Any) -> None:
        self.load_began_s, self.waited_s = time.perf_counter(), 0.0
        load(*arguments)

    def _wait(self, wait: Any, layer_index: int) -> None:
        began = time.perf_counter()
        wait(layer_index)
        self.waited_s += time.perf_counter() - began

    def first_token(self, job: Job) -> tuple[int, float]:
        """Return a request's token, and how long it took."""
        began = time.perf_counter()
        self.worker.submit(job)
        answer = asyncio.run_coroutine_threadsafe(job.outputs.get(), self._loop).result(WAIT_S)
        taken = time.perf_counter() - began
        if not hasattr(answer, "token_id"):
            raise RuntimeError(f"a request has failed: {answer}")
        return answer.token_id, taken

    def close(self) -> None:
        self.worker.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def decode(pipe: Any, options: argparse.Namespace, size: "Size", transport: str) -> None:
    """The decode engine's process: it answers when each prompt had come, and its first token."""
    torch.set_num_threads(options.threads)
    server = Server(
        random_llama(size.layers),
        size.num_blocks,
        size.chunk,
        role="decode",
        transports=[transport],
    )
    pipe.send(None)
    while (asked := pipe.recv()) is not None:
        prompt, source, transfer_id = asked
        began = time.perf_counter()
        token, _ = server.first_token(Job(prompt, FIRST, Fetch(source, transfer_id)))
        pipe.send((server.came_s, server.came_s - began, token))
    server.close()


class Size(NamedTuple):
    """A model and its prompts."""

    layers: int
    tokens: int
    chunk: int

    @property
    def num_blocks(self) -> int:
        return 3 * (self.tokens // BLOCK + 2)

    def prompt(self) -> list[int]:
        return [random.randrange(4096) for _ in range(self.tokens)]


def hand_offs(options: argparse.Namespace, size: Size, transport: str) -> dict[str, Any]:
    """One row: prompts that are handed over."""
    context = new_processes()
    pipe, theirs = context.Pipe()
    process = context.Process(target=decode, args=(theirs, options, size, transport), daemon=True)
    process.start()
    theirs.close()
    prefill = Server(
        random_llama(size.layers),
        size.num_blocks,
        size.chunk,
        role="prefill",
        transports=[transport],
    )
    pipe.recv()
    transfers = prefill.worker.transfers
    assert transfers is not None
    seconds: dict[str, list[float]] = {"layers": [], "chunks": [], "whole": []}
    computing: dict[str, list[float]] = {"layers": [], "chunks": [], "whole": []}
    try:
        for index in range(1 + options.repeat):
            for how in ("layers", "chunks", "whole"):
                prefill.by_chunks = how == "chunks"
                prompt, name = size.prompt(), f"{how} {index}"
                asked = (prompt, Source("", [transfers._transfer.name]), name)
                if how != "whole":
                    pipe.send(asked)
                    time.sleep(0.05)  # its question is there
                token, computed_s = prefill.first_token(Job(prompt, FIRST, Send(name)))
                ended_s = prefill.step_ended_s
                if how == "whole":
                    pipe.send(asked)
                came_s, taken, there = pipe.recv()
                if there != token:
                    raise RuntimeError(f"{name}: the first token is {there}, not {token}")
                if index:
                    seconds[how].append(taken if how == "whole" else came_s - ended_s)
                    computing[how].append(computed_s)
    finally:
        prefill.close()
        pipe.send(None)
        process.join()
    row: dict[str, Any] = {
        "case": f"hand-off, {size.tokens} tokens, chunks of {size.chunk}, {transport}",
        "us": statistics.median(seconds["layers"]) * 1e6,
        "us_by_chunks": statistics.median(seconds["chunks"]) * 1e6,
        "us_whole": statistics.median(seconds["whole"]) * 1e6,
        "rounds": options.repeat,
    }
    for name, part in (("percent", "layers"), ("percent_by_chunks", "chunks")):
        pairs = zip(seconds[part], seconds["whole"], strict=True)
        row[name], row[f"{name}_quartiles"] = spread([100 * a / b for a, b in pairs])
    for how in ("layers", "chunks"):
        pairs = zip(computing["whole"], computing[how], strict=True)
        row[f"x_prefill_{how}"], row[f"x_prefill_{how}_quartiles"] = spread(
            [a / b for a, b in pairs]
        )
    return row


def answers(
    model: Llama, size: Size, url: str, stored: type | None, *prompts: list[int]
) -> tuple[Server, list[tuple[int, float]]]:
    """Return what a new server answers, one prompt after the other, and that server, closed."""
    server = Server(model, size.num_blocks, size.chunk, store=url, stored=stored)
    tokens = [server.first_token(Job(prompt, FIRST)) for prompt in prompts]
    server.close()
    return server, tokens


def loads(options: argparse.Namespace, size: Size, num_common: int) -> dict[str, Any]:
    """One row: prompts whose first tokens are in a store."""
    model = random_llama(size.layers)
    times: dict[str, list[float]] = {
        "cold": [], "store": [], "own": [], "whole": [], "load": [], "exposed": []
    }  # fmt: skip
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for index in range(1 + options.repeat):
            url = f"shm:{folder}/{index}?size={size.tokens * size.layers * 3 * 64 * 2 * 4 * 2}"
            first = size.prompt()
            prompt = first[:num_common] + size.prompt()[num_common:]

            _, [(_, cold)] = answers(model, size, url, None, first)
            whole, [(expected, us_whole)] = answers(model, size, url, LoadedFirst, prompt)
            ours, [(token, us_store)] = answers(model, size, url, StoredBlocks, prompt)
            # What the prompt itself has in the cache by now is more than what it began with.
            _, [_, (own_token, us_own)] = answers(model, size, url, StoredBlocks, first, prompt)
            if not expected == token == own_token:
                raise RuntimeError(f"first tokens are {expected}, {token}, {own_token}")
            if index:
                for name, value in (
                    ("cold", cold), ("whole", us_whole), ("store", us_store), ("own", us_own),
                    ("load", whole.came_s - whole.load_began_s),
                    ("exposed", ours.came_s - ours.load_began_s + ours.waited_s),
                ):  # fmt: skip
                    times[name].append(value)
    row: dict[str, Any] = {
        "case": f"store, {num_common} of {size.tokens} tokens, chunks of {size.chunk}",
        "us": statistics.median(times["store"]) * 1e6,
        "rounds": options.repeat,
    }
    for name in ("whole", "own", "cold", "load", "exposed"):
        row[f"us_{name}"] = statistics.median(times[name]) * 1e6
    pairs = [*zip(times["exposed"], times["load"], strict=True)]
    row["hidden"], row["hidden_quartiles"] = spread([100 * (1 - a / b) for a, b in pairs])
    for name, of in (("cold", "store"), ("own", "own")):
        pairs = [*zip(times["cold"], times[of], strict=True)]
        row[f"x_{name}"], row[f"x_{name}_quartiles"] = spread([a / b for a, b in pairs])
    return row


def line(row: dict[str, Any]) -> str:
    """Return one row of the table."""
    text = f"{row['case']:46} {row['us']:10.0f} us"
    for name, value in row.items():
        if isinstance(value, float) and name != "us":
            text += f"  {name} {value:.0f}" if name.startswith("us_") else f"  {name} {value:.1f}"
    return text + "\n"


def main() -> None:
    options = arguments(
        __doc__, lambda parser: parser.set_defaults(repeat=3), without=("device", "seconds")
    )
    head, rows = heading("layers", options), []
    size = Size(8, 320, 64) if options.quick else Size(30, 2000, 128)
    large = size._replace(chunk=4 * size.chunk)
    random.seed(0)
    measures = [
        partial(hand_offs, options, *form)
        for form in ((size, "shm"), (size, "tcp"), (large, "tcp"))
    ]
    for num_common in (size.tokens // BLOCK * BLOCK, size.tokens // 2 // BLOCK * BLOCK):
        measures.append(partial(loads, options, size, num_common))
    for measure in measures[:: 3 if options.quick else 1]:
        rows.append(measure())
        sys.stdout.write(line(rows[-1]))
        sys.stdout.flush()
        save(head, rows, options)


if __name__ == "__main__":
    main()
