"""Transfers of a GPU's memory, by every way there is on one machine, compared with torch's copies.

The owner of the remote memory is another process, or for `local` this one; a file is in --folder. A
batch is one call: blocks of one size from random places to random places. `one_copy` moves as many
bytes in one piece by `Tensor.copy_`: between two tensors of this process, of which one is in pinned
memory if the transfer has host memory or a file at one end. `host` is the same transfer
with host memory at both ends. GB/s counts the bytes moved, once.
"""

import argparse
import contextlib
import functools
import itertools
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib.harness import arguments, folder, spread
from lib.table import heading, save

REGION_BYTES = 256 << 20
CASES = [(4 << 10, 1), (16 << 10, 4096), (64 << 10, 1024), (1 << 20, 64), (64 << 20, 1)]
QUICK = [(4 << 10, 1), (16 << 10, 1024)]
WAYS = [  # transport, memory here, memory there
    ("local", "gpu", "gpu"),
    ("local", "host", "gpu"),
    ("local", "pinned", "gpu"),
    ("cuda_ipc", "gpu", "gpu"),
    ("cuda_ipc", "host", "gpu"),
    ("cuda_ipc", "pinned", "gpu"),
    ("shm", "gpu", "shared"),
    ("shm", "gpu", "host"),
    ("tcp", "gpu", "gpu"),
    ("tcp", "gpu", "host"),
    ("file", "gpu", "file"),
]
TRANSPORTS = tuple(dict.fromkeys(way[0] for way in WAYS))
WAIT_S = 120.0


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    parser.add_argument("--folder", type=folder, default=Path("."), help="of the file")


def memory_of(kind: str) -> Any:
    """Return memory of a GPU ("gpu"), pinned, shared or ordinary ("host") memory, in use."""
    if kind == "gpu":
        memory: Any = torch.empty(REGION_BYTES, dtype=torch.uint8, device="cuda")
    elif kind == "pinned":
        memory = torch.empty(REGION_BYTES, dtype=torch.uint8, pin_memory=True)
    elif kind == "shared":
        memory = torch.from_numpy(mk.shared_memory(REGION_BYTES).numpy())
    else:
        memory = torch.empty(REGION_BYTES, dtype=torch.uint8)
    memory.fill_(1)
    torch.cuda.synchronize()
    return memory


@functools.cache
def pattern(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (REGION_BYTES,), dtype=torch.uint8, generator=generator)


def fill(memory: torch.Tensor, seed: int) -> None:
    memory.copy_(pattern(seed))
    torch.cuda.synchronize()


def bytes_at(memory: torch.Tensor, places: np.ndarray) -> np.ndarray:
    return memory[torch.from_numpy(places).to(memory.device)].cpu().numpy()


def serve(pipe: Any, transport: str, kind: str) -> None:
    """The owner of the remote memory."""
    engine, memory = mk.TransferEngine(transports=[transport]), memory_of(kind)
    region = engine.register(memory)
    pipe.send((engine.name, region.address))
    with contextlib.suppress(EOFError):
        while (message := pipe.recv()) is not None:
            what, value = message
            if what == "fill":
                pipe.send(fill(memory, value))
            else:
                pipe.send(bytes_at(memory, value))


class Here:
    """Remote memory of this process."""

    def __init__(self, engine: mk.TransferEngine, kind: str):
        self.memory = memory_of(kind)
        self.name, self.address = engine.name, engine.register(self.memory).address

    def ask(self, what: str, value: Any) -> Any:
        if what == "fill":
            return fill(self.memory, value)
        return bytes_at(self.memory, value)


class There:
    """Remote memory of another process."""

    def __init__(self, transport: str, kind: str):
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, transport, kind), daemon=True)
        self.process.start()
        self.name, self.address = self._receive()

    def _receive(self) -> Any:
        if not self.pipe.poll(WAIT_S):
            sys.exit("the process that owns the remote memory does not answer")
        return self.pipe.recv()

    def ask(self, what: str, value: Any) -> Any:
        self.pipe.send((what, value))
        return self._receive()

    def close(self) -> None:
        self.pipe.send(None)
        self.process.join(WAIT_S)


class File:
    """A file instead of remote memory."""

    def __init__(self, path: Path):
        self.path, self.name, self.address = path, f"file:{path}", 0

    def ask(self, what: str, value: Any) -> Any:
        if what == "fill":
            return self.path.write_bytes(pattern(value).numpy().data)
        return np.fromfile(self.path, np.uint8)[value]


@dataclass
class Way:
    """Local and remote memory, and an engine that moves bytes between them."""

    engine: mk.TransferEngine
    memory: torch.Tensor
    region: Any
    remote: Here | There | File
    peer: Any

    def call(
        self, verb: str, local: np.ndarray, remote: np.ndarray, size: int
    ) -> Callable[[], Any]:
        move = self.engine.write_blocks if verb == "write" else self.engine.read_blocks
        places = (local + self.region.address, remote + self.remote.address, size)
        return lambda: move(self.peer, *places).wait()

    def check(
        self, call: Callable[[], Any], verb: str, local: np.ndarray, remote: np.ndarray, size: int
    ) -> None:
        """Raise unless the bytes arrive."""
        fill(self.memory, 1)
        self.remote.ask("fill", 2)
        call()
        some = np.linspace(0, len(local) - 1, min(len(local), 64)).astype(int)
        inside = np.unique(np.linspace(0, size - 1, 256).astype(int))
        here, there = ((at[some, None] + inside).ravel() for at in (local, remote))
        got = bytes_at(self.memory, here)
        assert np.array_equal(got, self.remote.ask("look", there)), f"a {verb} is wrong: not timed"


@contextlib.contextmanager
def opened(transport: str, here: str, there: str, where: Path) -> Iterator[Way]:
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(mk.TransferEngine(transports=[transport]))
        if transport == "file":
            path = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=where))) / "pool"
            remote: Here | There | File = File(path.resolve())
            remote.ask("fill", 0)
        elif transport == "local":
            remote = Here(engine, there)
        else:
            remote = There(transport, there)
            stack.callback(remote.close)
        memory = memory_of(here)
        region = engine.register(memory)
        peer = stack.enter_context(engine.open(remote.name))
        yield Way(engine, memory, region, remote, peer)


def one_copy(here: str, there: str, verb: str, num_bytes: int) -> Callable[[], None]:
    """Return torch's copy of as many bytes, between a GPU and a GPU or pinned memory."""
    kinds = ["gpu" if kind == "gpu" else "pinned" for kind in (here, there)]
    source, target = (
        memory_of(kind)[:num_bytes] for kind in (kinds if verb == "write" else kinds[::-1])
    )

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()

    return copy


def timed(calls: dict[str, Callable[[], Any]], repeat: int, until: float) -> list[dict[str, float]]:
    """Call them in turn, each going first equally often; seconds of each round."""
    rounds = []
    for i in range(2 + repeat):
        names = list(calls)
        taken = {}
        for name in [*names[i % len(names) :], *names[: i % len(names)]]:
            start = time.perf_counter()
            calls[name]()
            taken[name] = time.perf_counter() - start
        rounds.append(taken)
        if len(rounds) >= 5 and time.perf_counter() > until:
            break
    return rounds[2:]  # the first ones open handles, and allocate what stages


def rows_of(
    way: tuple[str, str, str], options: argparse.Namespace, rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    transport, here, there = way
    with contextlib.ExitStack() as stack:
        moves = {"ours": stack.enter_context(opened(*way, options.folder))}
        if transport in ("shm", "tcp", "file"):
            ends = ("host", "file" if transport == "file" else "host")
            moves["host"] = stack.enter_context(opened(transport, *ends, options.folder))
        for verb, (size, batch) in itertools.product(
            ("write", "read"), QUICK if options.quick else CASES
        ):
            local, remote = (rng.permutation(REGION_BYTES // size)[:batch] * size for _ in range(2))
            calls = {name: m.call(verb, local, remote, size) for name, m in moves.items()}
            for name, m in moves.items():
                m.check(calls[name], verb, local, remote, size)
            calls["one_copy"] = one_copy(here, there, verb, size * batch)
            rounds = timed(calls, options.repeat, time.perf_counter() + options.seconds)
            ours = statistics.median(taken["ours"] for taken in rounds)
            path = moves["ours"].engine.explain_path(
                moves["ours"].region, moves["ours"].peer, moves["ours"].remote.address
            )
            row = {
                "case": f"{transport} {verb}, {here} and {there}, {batch} x {size >> 10} KiB",
                "us": ours * 1e6,
                "gb_per_s": size * batch / ours / 1e9,
                "path": f"{path.transport} {path.method}",
                "rounds": len(rounds),
            }
            for name in calls:
                if name != "ours":
                    ratios = [taken[name] / taken["ours"] for taken in rounds]
                    row[f"x_{name}"], row[f"x_{name}_quartiles"] = spread(ratios)
            yield row


def say(row: dict[str, Any]) -> None:
    text = f"{row['case']:46} {row['us']:10.1f} us {row['gb_per_s']:8.2f} GB/s"
    text += "".join(f"   {row[f'x_{n}']:.2f}x {n}" for n in ("one_copy", "host") if f"x_{n}" in row)
    sys.stdout.write(f"{text}   ({row['path']})\n")
    sys.stdout.flush()


def main() -> None:
    options = arguments(__doc__, add_options)
    head, rows, left_out = heading("transfer_gpu", options), [], []
    for way in WAYS:
        if way[0] not in options.transports:
            continue
        if options.device != "cuda":
            left_out.append({"case": " ".join(way), "left_out": "--device is not cuda"})
            continue
        for row in rows_of(way, options, np.random.default_rng(0)):
            rows.append(row)
            say(row)
            save(head, rows, options, left_out)
    if left_out:
        sys.stdout.write(f"left out, as --device is not cuda: {len(left_out)} ways\n")
    save(head, rows, options, left_out)


if __name__ == "__main__":
    main()
