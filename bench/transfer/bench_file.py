"""The transport file and fio, in turn: the same blocks, queue depth and file system.

Both move as many bytes past the page cache, from one thread and by io_uring: ours as one request,
fio as one job, timed by its own clock, without its start. Both write from as many blocks as are in
flight, again and again; fio also reads into those, ours into memory of the file's size, for the
targets of one request must not overlap. Both in huge pages. Without fio (`apt-get install fio`) its
columns are left out.
"""

import argparse
import ctypes
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib.harness import arguments, at_least, folder, spread
from lib.table import heading, save
from mooncake_kernels import config

DEPTH = 64  # of a lane: csrc/transfer/file/file_channel.cc
CASES = [("sequential", 1 << 20), ("random", 64 << 10), ("random", 16 << 10)]
TARGET = 0.9


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=folder, default=Path("."), help="on the disk in question")
    parser.add_argument(
        "--mib", type=at_least(1), default=1024, help="of the file, moved by every call"
    )


def huge_pages(num_bytes: int) -> np.ndarray:
    """Memory in huge pages: a disk that is given pages of 4 KiB takes longer."""
    memory = np.empty(num_bytes + (2 << 20), np.uint8)
    memory = memory[-memory.ctypes.data % (2 << 20) :][:num_bytes]
    advice = 14  # MADV_HUGEPAGE
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(num_bytes), advice
    )
    memory[:] = 1
    return memory


class Moves:
    """Our moves and fio's between one file and memory."""

    def __init__(self, path: Path, num_bytes: int):
        self.path, self.num_bytes = path, num_bytes
        self.content = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
        path.write_bytes(self.content.tobytes())
        with config.override(transfer_lanes=1):
            self.engine = mk.TransferEngine(transports=["file"])
        self.memory = huge_pages(num_bytes)
        self.region = self.engine.register(self.memory)
        self.peer = self.engine.open(f"file:{path}")
        self.peer.sync(deadline_s=600).wait()

    def ours(self, verb: str, order: str, size: int) -> float:
        """Return the seconds that one request took."""
        places = np.arange(0, self.num_bytes, size, dtype=np.int64)
        offsets = np.random.permutation(places) if order == "random" else places
        call, here = self.engine.read_blocks, offsets
        if verb == "write":
            call, here = self.engine.write_blocks, offsets % (DEPTH * size)
        start = time.perf_counter()
        call(self.peer, self.region.address + here, offsets, size, deadline_s=600).wait()
        return time.perf_counter() - start

    def fio(self, verb: str, order: str, size: int) -> float:
        """Return the seconds that fio reports."""
        command = ["fio", "--name=job", f"--filename={self.path}", "--direct=1"]
        command += ["--ioengine=io_uring", f"--iodepth={DEPTH}", f"--bs={size}"]
        command += [f"--rw={'rand' if order == 'random' else ''}{verb}"]
        command += [f"--size={self.num_bytes}", "--output-format=json"]
        env = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}  # huge pages for fio, too
        said = subprocess.run(command, check=True, capture_output=True, text=True, env=env).stdout
        return self.num_bytes / json.loads(said)["jobs"][0][verb]["bw_bytes"]

    def check(self, order: str, size: int) -> None:
        """Raise unless the bytes arrive, both ways."""
        blocks = self.content[: DEPTH * size]
        self.memory[: len(blocks)] = blocks
        self.ours("write", order, size)
        self.memory[:] = 1
        self.ours("read", order, size)
        expected = np.resize(blocks, self.num_bytes)
        assert np.array_equal(self.memory, expected), "a transfer is wrong: not timed"
        assert np.array_equal(np.fromfile(self.path, np.uint8), expected)

    def close(self) -> None:
        self.engine.close()


def measure(
    moves: Moves, libraries: list[str], case: tuple[str, str, int], options: argparse.Namespace
) -> dict[str, Any]:
    """One row: ours and fio in turn, each going first equally often."""
    moves.check(*case[1:])
    rounds = []
    for i in range(options.repeat):
        names = libraries if i % 2 == 0 else libraries[::-1]
        rounds.append({name: getattr(moves, name)(*case) for name in names})
    ours = statistics.median(taken["ours"] for taken in rounds)
    row: dict[str, Any] = {"gb_per_s": moves.num_bytes / ours / 1e9, "rounds": len(rounds)}
    if "fio" in libraries:
        fio = statistics.median(taken["fio"] for taken in rounds)
        row["x_fio"], row["x_fio_quartiles"] = spread([t["fio"] / t["ours"] for t in rounds])
        row["gb_per_s_fio"] = moves.num_bytes / fio / 1e9
        row["reaches_target"] = row["x_fio"] >= TARGET
    return row


def say(row: dict[str, Any]) -> None:
    text = f"{row['case']:34} {row['gb_per_s']:7.2f} GB/s"
    if "x_fio" in row:
        text += f"   {row['x_fio']:.2f}x fio ({row['gb_per_s_fio']:.2f})"
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> None:
    options = arguments(__doc__, add_options, without=("device", "seconds"))
    if options.quick:
        options.mib = min(options.mib, 64)
        options.repeat = min(options.repeat, 3)
    head, rows, left_out, libraries = heading("file", options), [], [], ["ours"]
    if shutil.which("fio"):
        libraries.append("fio")
    else:
        left_out.append({"case": "fio", "left_out": "it is not installed"})
        sys.stdout.write("fio left out: it is not installed\n")
    with tempfile.TemporaryDirectory(dir=options.folder) as own:
        moves = Moves(Path(own).resolve() / "pool", options.mib << 20)
        for order, size in CASES:
            for verb in ("read", "write"):
                case = f"{verb}, {order}, {size >> 10} KiB"
                row = measure(moves, libraries, (verb, order, size), options)
                rows.append({"case": case, **row})
                say(rows[-1])
                save(head, rows, options, left_out)
        moves.close()
    save(head, rows, options, left_out)


if __name__ == "__main__":
    main()
