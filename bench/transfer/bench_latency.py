"""The latency of one small request, from the call to its end, on an idle engine.

In Python: ``engine.write(peer, [(local, remote, size)]).wait()`` and ``write_blocks`` of arrays. In
C++: the same without Python, by transfer_latency.cc, which is built here from csrc, in two minutes;
not with ``--quick``. The peer is a process of this machine. `tcp` is compared with a bare socket
that sends as many bytes and gets a few back.
The programs run in turn in each round; the figures are medians of the rounds' medians.
"""

import argparse
import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib.harness import arguments, at_least
from lib.processes import new_processes
from lib.table import heading, save

ROOT = Path(__file__).resolve().parents[2]
TRANSPORTS = ("shm-mapped", "shm", "local", "tcp")  # mapped: the target is mk.shared_memory()
REGION_BYTES = 1 << 20
ANSWER_BYTES = 24


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--transports", nargs="+", default=list(TRANSPORTS), choices=TRANSPORTS)
    size = at_least(1, most=REGION_BYTES)
    parser.add_argument("--sizes", nargs="+", type=size, default=[4096], help="bytes of a request")
    parser.add_argument("--requests", type=at_least(1), default=2000, help="a round")
    parser.add_argument("--spin-us", type=int, default=0)


def sources() -> list[Path]:
    """The engine, and what it is built on."""
    families = ("common", "rdma", "topology", "transfer")
    engine = [file for name in families for file in sorted((ROOT / "csrc" / name).rglob("*.cc"))]
    return [Path(__file__).with_name("transfer_latency.cc"), *engine]


def build(folder: Path) -> Path:
    """Compile transfer_latency.cc with the sources of the engine."""
    program = folder / "transfer_latency"
    folders = "csrc", "third_party", "third_party/rdma-core"
    flags = ["-O3", "-std=c++17", *(f"-I{ROOT / folder}" for folder in folders), "-pthread"]
    subprocess.run(["g++", *flags, *sources(), "-ldl", "-o", program], check=True)
    return program


def in_cpp(program: Path, options: argparse.Namespace, transport: str, size: int) -> dict:
    """Medians in microseconds, by verb."""
    numbers = [str(number) for number in (size, options.requests, options.spin_us)]
    run = subprocess.run([program, transport, *numbers], check=True, capture_output=True, text=True)
    rows = [line.split() for line in run.stdout.splitlines()]
    return {f"us_cpp_{verb}": float(median) for verb, median, _ in rows}


def median_us(call: Callable[[], None], count: int) -> float:
    taken = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken) * 1e6


def serve(pipe: Any, mapped: bool, spin_us: int) -> None:
    """The peer process: an engine and a bare socket."""
    memory = mk.shared_memory(REGION_BYTES).numpy() if mapped else np.zeros(REGION_BYTES, np.uint8)
    engine = mk.TransferEngine(spin_us=spin_us)
    region = engine.register(memory)
    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=echo, args=(listening,), daemon=True).start()
    pipe.send((engine.name, region.address, listening.getsockname()))
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(bytes(memory[: pipe.recv()]))


def echo(listening: socket.socket) -> None:
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    size = int.from_bytes(connection.recv(8, socket.MSG_WAITALL), "little")
    while len(connection.recv(size, socket.MSG_WAITALL)) == size:
        connection.sendall(bytes(ANSWER_BYTES))


class Peer:
    """An engine in another process, and the side that sends it requests."""

    def __init__(self, transport: str, options: argparse.Namespace):
        self.is_local = transport == "local"
        context = new_processes()
        self.pipe, theirs = context.Pipe()
        where = (theirs, transport == "shm-mapped", options.spin_us)
        kind: Any = threading.Thread if self.is_local else context.Process
        kind(target=serve, args=where, daemon=True).start()
        name, self.remote, self.bare_address = self.pipe.recv()
        self.engine = mk.TransferEngine(
            transports=[transport.split("-")[0]], spin_us=options.spin_us
        )
        self.memory = np.arange(REGION_BYTES, dtype=np.uint32).astype(np.uint8)
        self.local = self.engine.register(self.memory).address
        self.peer = self.engine.open(name)

    def calls(self, size: int) -> dict[str, Callable[[], None]]:
        engine, peer = self.engine, self.peer
        rows = [(self.local, self.remote, size)]
        local, remote = np.array([self.local]), np.array([self.remote])
        return {
            "us_write": lambda: engine.write(peer, rows).wait(),
            "us_read": lambda: engine.read(peer, rows).wait(),
            "us_write_blocks": lambda: engine.write_blocks(peer, local, remote, size).wait(),
            "us_write_checksum": lambda: engine.write(peer, rows, checksum=True).wait(),
        }

    def bare(self, size: int) -> Callable[[], None]:
        connection = socket.create_connection(self.bare_address)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(size.to_bytes(8, "little"))
        data = bytes(size)

        def call() -> None:
            connection.sendall(data)
            connection.recv(ANSWER_BYTES, socket.MSG_WAITALL)

        return call

    def check(self, size: int) -> None:
        self.calls(size)["us_write"]()
        self.pipe.send(size)
        assert self.pipe.recv() == self.memory[:size].tobytes(), "not what was written: not timed"


def measure(program: Path | None, options: argparse.Namespace, transport: str, size: int) -> dict:
    peer = Peer(transport, options)
    peer.check(size)
    calls = peer.calls(size)
    if transport == "tcp":
        calls["us_bare_socket"] = peer.bare(size)
    rounds = []
    for _ in range(options.repeat):
        row = {name: median_us(call, options.requests) for name, call in calls.items()}
        rounds.append(row | (in_cpp(program, options, transport, size) if program else {}))
    peer.engine.close()
    return {name: statistics.median(row[name] for row in rounds) for name in rounds[0]}


def main() -> None:
    options = arguments(__doc__, add_options, without=("device", "seconds"))
    if options.quick:
        options.requests = min(options.requests, 200)
    head, rows = heading("latency", options), []
    with tempfile.TemporaryDirectory() as folder:
        program = None if options.quick else build(Path(folder))
        for transport in options.transports:
            for size in options.sizes:
                figures = measure(program, options, transport, size)
                rows.append({"case": f"{transport}, {size} bytes", **figures})
                told = "  ".join(f"{name[3:]} {us:.2f}" for name, us in figures.items())
                sys.stdout.write(f"{rows[-1]['case']:26} us: {told}\n")
                sys.stdout.flush()
                save(head, rows, options)


if __name__ == "__main__":
    main()
