"""``python -m mooncake_kernels bandwidth``: how fast an engine moves blocks to or from another.

The options are named after those of Mooncake's ``transfer_engine_bench``. A batch is one call, and
a thread makes one after the other::

    for each thread, until --duration has passed:
        at = --batch-size places of --block-size bytes, of the thread's part of both buffers
        write_blocks(peer, local + at, remote + permuted(at), --block-size).wait()
"""

import argparse
import dataclasses
import itertools
import json
import math
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import config
from ..buffers import shared_memory
from ..command_line import server_url
from ..errors import InvalidArgument, TransferError, Unavailable
from ..pool import ObjectPool, object_keys
from .engine import TRANSPORTS, TransferEngine
from .handles import Peer, Region
from .regions import RemoteRegion

OFFERED = object_keys([0], "bandwidth")  # where a target says what it offers
NUM_BATCHES = 8  # different ones of a thread, made before the clock runs
# Bytes of a unit.
UNITS = {"GB": 1e9, "GiB": 2**30, "Gb": 1e9 / 8, "MB": 1e6, "MiB": 2**20, "Mb": 1e6 / 8}
SUFFIXES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the command ``bandwidth``."""
    parser = commands.add_parser(
        "bandwidth",
        help="move blocks to or from another machine, and say how fast",
        description="Start it with --mode target on one machine, and with the --segment-id that "
        "this one prints on another. Who reaches the target may write to its memory, unless both "
        "have a secret: MOONCAKE_KERNELS_SECRET.",
        allow_abbrev=False,
    )
    parser.set_defaults(error=parser.error)

    group = parser.add_argument_group("either side")

    def add(name: str, **rest: Any) -> None:  # Mooncake's spelling is taken as well
        names = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
        group.add_argument(*names, **rest)

    add("mode", choices=("initiator", "target"), default="initiator")
    add("local-server-name", metavar="NAME", help="this engine's; under p2p HOST:PORT to listen on")
    add("metadata-server", metavar="URL", help="p2p (default), redis://... or http://...")
    add("metadata-server-file", metavar="FILE", help="whose first line is that URL: a password in "
        "an option is seen by all users; or set MOONCAKE_KERNELS_METADATA_SERVER")  # fmt: skip
    between = [name for name in TRANSPORTS if name not in ("local", "file")]
    add("protocol", nargs="+", choices=between, help="allow only these")
    add("gpu-id", type=int, metavar="N", help="memory of this GPU, in place of the host's")
    size = {"type": num_bytes, "metavar": "BYTES"}
    add("buffer-size", default=1 << 30, help="memory of either side (1G)", **size)
    group = parser.add_argument_group("the initiator")
    add("segment-id", metavar="NAME", help="of the target, which it prints")
    add("operation", choices=("read", "write"), default="read")
    add("block-size", default=64 << 10, help="of one block (64k)", **size)
    add("batch-size", type=positive, default=128, metavar="N", help="blocks a call (128)")
    add("threads", type=positive, default=1, metavar="N", help="each with its part of the memory")
    add("sequential", action="store_true", help="neighbouring blocks, in place of random ones")
    add("duration", type=seconds, default=10.0, metavar="SECONDS", help="(10)")
    add("report-unit", choices=list(UNITS), default="GB", help="a second (GB)")
    add("json", type=Path, metavar="FILE", help="also write the result to this file")


def num_bytes(text: str) -> int:
    """Parse a size: bytes, or with k, m or g a power of 1024 of them."""
    found = re.fullmatch(r"(\d+)([kmg]?)(i?b)?", text.lower())
    size = int(found[1]) * SUFFIXES[found[2]] if found else 0
    if not 1 <= size < 1 << 63:
        raise argparse.ArgumentTypeError(f"must be bytes, like 65536 or 64k, got {text}")
    return size


def positive(text: str) -> int:
    """Parse an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text}")
    return int(text)


def seconds(text: str) -> float:
    """Parse a time that ends."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text}")
    return value


def run(options: argparse.Namespace) -> int:
    """Offer memory until a signal, or move blocks and print how fast."""
    if (options.segment_id is None) != (options.mode == "target"):
        expectation = "not be given to a target" if options.segment_id else "name the target"
        options.error(f"--segment-id must {expectation}, got {options.segment_id}")
    if options.json and not options.json.parent.is_dir():
        options.error(f"--json must be a file in a folder that exists, got {options.json}")
    given, file = options.metadata_server, options.metadata_server_file
    setting = config.current().metadata_server
    metadata = server_url("--metadata-server", given, file, setting) or "p2p"
    with TransferEngine(
        options.local_server_name,
        metadata="p2p" if metadata == "P2PHANDSHAKE" else metadata,
        transports=options.protocol,
    ) as engine:
        memory = allocate(options.buffer_size, options.gpu_id)
        region = engine.register(memory)
        if options.mode == "target":
            offer(engine, region)
        else:
            with engine.open(options.segment_id, allow_file=False) as peer:
                initiate(engine, peer, region, memory, options)
    return 0


def allocate(size: int, gpu: int | None) -> torch.Tensor:
    """Return memory of random bytes: of the host, which peers on this machine map, or of a GPU."""
    if gpu is None:
        memory = shared_memory(size)
    elif 0 <= gpu < torch.cuda.device_count():
        memory = torch.empty(size, dtype=torch.uint8, device=f"cuda:{gpu}")
    else:
        raise Unavailable(f"--gpu-id must be one of {torch.cuda.device_count()} GPUs, got {gpu}")
    memory.random_(0, 256)
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)
    return memory


def offer(engine: TransferEngine, region: Region) -> None:
    """Print the name to call, and wait for SIGINT or SIGTERM."""
    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    with ObjectPool.create(4096) as pool:  # tells strangers as well, unlike engine.regions
        gpu = int(region.location.partition(":")[2]) if region.location != "cpu:0" else -1
        offered = np.array([region.address, region.num_bytes, gpu])
        pool.put_from(OFFERED[0], offered)
        engine.serve(pool)
        sys.stdout.write(f"{engine.name} offers {region.num_bytes} bytes of {region.location}\n")
        sys.stdout.flush()
        ended.wait()


@dataclasses.dataclass
class Mover:
    """What one thread moves.

    Attributes:
        call: of the engine: ``write_blocks`` or ``read_blocks``.
        peer: to or from whom.
        batches: addresses here, and at the peer.
        size: bytes a block.
        times: seconds that each call has taken.
    """

    call: Any
    peer: Peer
    batches: list[tuple[np.ndarray, np.ndarray]]
    size: int
    times: list[float] = dataclasses.field(default_factory=list)

    def move(self, stop: threading.Event) -> None:
        """Move batch after batch, in turn, until it is to stop."""
        for local, remote in itertools.cycle(self.batches):
            if stop.is_set():
                return
            start = time.perf_counter()
            self.call(self.peer, local, remote, self.size).wait()
            self.times.append(time.perf_counter() - start)


def initiate(
    engine: TransferEngine,
    peer: Peer,
    region: Region,
    memory: torch.Tensor,
    options: argparse.Namespace,
) -> None:
    """Check one batch of each thread, run the clock, and report."""
    remote = memory_of(engine, peer)
    call = engine.write_blocks if options.operation == "write" else engine.read_blocks
    movers = [
        Mover(call, peer, batches, options.block_size)
        for batches in batches_of(region, remote, options)
    ]
    for mover in movers:
        check(engine, mover, memory, region)
    batch_bytes = options.block_size * options.batch_size
    before, cpu = bytes_by_path(engine, peer), time.process_time()
    taken = timed(movers, batch_bytes, options)
    cpu = time.process_time() - cpu
    times = np.array([second for mover in movers for second in mover.times])
    moved = len(times) * batch_bytes
    after = bytes_by_path(engine, peer)
    result = {
        "transport": peer.transport,
        "local": region.location,
        "remote": remote.location,
        "operation": options.operation,
        "block_size": options.block_size,
        "batch_size": options.batch_size,
        "threads": options.threads,
        "sequential": options.sequential,
        "seconds": taken,
        "num_bytes": moved,
        "gb_per_s": moved / taken / 1e9,
        "batches_per_s": len(times) / taken,
        "batch_us": dict(zip(("p50", "p99", "max"), quantiles(1e6 * times), strict=True)),
        "cores": cpu / taken,
        "bytes_by_path": {path: n - before.get(path, 0) for path, n in after.items()},
    }
    sys.stdout.write(described(result, options.report_unit))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def memory_of(engine: TransferEngine, peer: Peer) -> RemoteRegion:
    """Ask a target for what it offers."""
    offered = np.empty(3, np.int64)
    places = [[(offered.ctypes.data, offered.nbytes)]]
    try:
        found = engine.read_objects_into(peer, OFFERED, places)[0] == offered.nbytes
        why = "it offers no memory"
    except (TransferError, Unavailable) as error:
        found, why = False, str(error)
    if not found:
        raise Unavailable(f"{peer.name} is no target, which --mode target starts: {why}")
    address, size, gpu = offered.tolist()
    return RemoteRegion(address, size, "read_write", "cpu:0" if gpu < 0 else f"cuda:{gpu}")


def batches_of(
    region: Region, remote: RemoteRegion, options: argparse.Namespace
) -> Iterator[list[tuple[np.ndarray, np.ndarray]]]:
    """Yield each thread's batches, in its own part of either memory."""
    room = min(region.num_bytes, remote.num_bytes) // options.threads // options.block_size
    if room < options.batch_size:
        raise InvalidArgument(
            f"--batch-size must be at most {room}, what each of {options.threads} threads has room "
            f"for in {min(region.num_bytes, remote.num_bytes)} bytes, got {options.batch_size}"
        )
    rng = np.random.default_rng(0)

    def places(first: int, batch: int) -> np.ndarray:
        if options.sequential:
            ids = np.arange(options.batch_size) + batch * options.batch_size
            ids %= room - room % options.batch_size
        else:
            ids = rng.permutation(room)[: options.batch_size]
        return first + ids * options.block_size

    for thread in range(options.threads):
        first = thread * room * options.block_size
        yield [
            (places(region.address + first, i), places(remote.address + first, i))
            for i in range(NUM_BATCHES)
        ]


def check(engine: TransferEngine, mover: Mover, memory: torch.Tensor, region: Region) -> None:
    """Write a batch, read it into cleared memory, and compare."""
    local, remote = mover.batches[0]
    places = [slice(at, at + mover.size) for at in (local - region.address).tolist()]
    sent = [memory[place].clone() for place in places]
    engine.write_blocks(mover.peer, local, remote, mover.size).wait()
    for place in places:
        memory[place].zero_()
    if memory.is_cuda:
        torch.cuda.synchronize(memory.device)
    engine.read_blocks(mover.peer, local, remote, mover.size).wait()
    wrong = [i for i, place in enumerate(places) if not torch.equal(memory[place], sent[i])]
    if wrong:
        raise Unavailable(f"{len(wrong)} of {len(places)} blocks came back changed: {wrong[:8]}")


def timed(movers: list[Mover], batch_bytes: int, options: argparse.Namespace) -> float:
    """Run the movers for the duration, or until Ctrl-C, and return the seconds it took.

    Raises:
        Exception: of the first of them that failed, once all have ended.
    """
    stop, errors = threading.Event(), []

    def work(mover: Mover) -> None:
        try:
            mover.move(stop)
        except Exception as error:  # noqa: BLE001 - raised again below
            errors.append(error)
            stop.set()

    threads = [threading.Thread(target=work, args=[mover]) for mover in movers]
    start = last = time.perf_counter()
    until, seen = start + options.duration, 0
    with stopped_by_ctrl_c(stop):
        for thread in threads:
            thread.start()
        while not stop.is_set() and last < until:
            stop.wait(min(1.0, until - last))
            now, moved = time.perf_counter(), sum(len(mover.times) for mover in movers)
            speed = (moved - seen) * batch_bytes / (now - last) / UNITS[options.report_unit]
            sys.stdout.write(f"{now - start:6.1f} s {speed:9.2f} {options.report_unit}/s\n")
            sys.stdout.flush()
            last, seen = now, moved
        stop.set()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return time.perf_counter() - start


@contextmanager
def stopped_by_ctrl_c(stop: threading.Event) -> Iterator[None]:
    """Set an event on Ctrl-C, so that what was measured until then is still reported."""
    previous = signal.signal(signal.SIGINT, lambda *_: stop.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)


def quantiles(times: np.ndarray) -> np.ndarray:
    """Return the median, the 99th percentile and the maximum; zeros if there are none."""
    return np.quantile(times, [0.5, 0.99, 1]) if len(times) else np.zeros(3)


def bytes_by_path(engine: TransferEngine, peer: Peer) -> dict[str, int]:
    """Return the bytes that each connection or NIC has moved so far."""
    paths = engine.stats()["paths"].get(peer.name, {})
    return {
        path: counters["num_bytes_read"] + counters["num_bytes_written"]
        for path, counters in paths.items()
    }


def described(result: dict[str, Any], unit: str) -> str:
    """Return the result in words."""
    speed = result["num_bytes"] / result["seconds"] / UNITS[unit]
    p50, p99, most = result["batch_us"].values()
    what = f"{result['operation']}, {result['batch_size']} x {result['block_size']} bytes a batch"
    lines = [
        f"{what}, {result['threads']} threads, by {result['transport']}, "
        f"{result['local']} - {result['remote']}",
        f"{speed:.2f} {unit}/s: {result['num_bytes']} bytes in {result['seconds']:.2f} s",
        f"{result['batches_per_s']:.0f} batches/s: {p50:.0f} us (median), {p99:.0f} us (p99), "
        f"{most:.0f} us (longest)",
        f"{result['cores']:.2f} cores busy in this process",
    ]
    total = sum(result["bytes_by_path"].values())
    shares = [
        f"{path} {100 * moved / total:.0f} %"
        for path, moved in result["bytes_by_path"].items()
        if moved
    ]
    if shares:
        lines.append("paths: " + ", ".join(shares))
    return "\n".join(lines) + "\n"
