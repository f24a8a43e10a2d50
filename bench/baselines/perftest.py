"""The baseline of RDMA benches: perftest's programs, both ends on this machine."""

import argparse
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable

from lib.processes import free_port

GID_INDEX = 1  # that of the guest's IPv4 address
DEPTH = 128  # messages in flight
TRIES = 5


def run(program: str, names: list[str], *words: str) -> str:
    """Run both ends of one of its programs, and return the client's output."""
    if shutil.which(program) is None:
        sys.exit(f"{program} is not installed: apt-get install perftest")
    common = [program, "-x", str(GID_INDEX), "-F", "-p", str(free_port()), *words]
    server = subprocess.Popen(
        [*common, "-d", names[1]], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(50):  # until the server listens
            client = [*common, "-d", names[0], "127.0.0.1"]
            done = subprocess.run(client, capture_output=True, text=True, timeout=120)
            if done.returncode == 0 or server.poll() is not None:
                break
            time.sleep(0.1)
    finally:
        server.kill()
        server.wait()
    return done.stdout + done.stderr


def figure(pattern: str, program: str, names: list[str], *words: str) -> float:
    """Run both ends, and return the number that a pattern finds in the client's output.

    In a slow guest they occasionally end without one, so they are run again.
    """
    for _ in range(TRIES):
        said = run(program, names, *words)
        found = re.search(pattern, said, re.MULTILINE)
        if found and float(found[1]) > 0:
            return float(found[1])
        time.sleep(1)
    raise RuntimeError(f"{program} printed nothing, {TRIES} times: {said}")


def gb_per_s(verb: str, names: list[str], size: int, count: int) -> float:
    words = "-s", str(size), "-n", str(count), "-t", str(DEPTH), "--report_gbits"
    average = rf"^ *{size} +\d+ +[\d.]+ +([\d.]+)"
    return figure(average, f"ib_{verb}_bw", names, *words) / 8


def read_us(names: list[str], size: int, count: int) -> float:
    median = rf"^ *{size} +\d+ +[\d.]+ +[\d.]+ +([\d.]+)"
    return figure(median, "ib_read_lat", names, "-s", str(size), "-n", str(count))


def few_rounds(parser: argparse.ArgumentParser) -> None:
    """Its programs start anew in each round."""
    parser.set_defaults(repeat=9)


def in_turn(
    ours: Callable[[], float], theirs: Callable[[], float], options: argparse.Namespace
) -> list[tuple[float, float]]:
    ours()
    rounds = []
    for i in range(options.repeat):
        if i % 2:
            second = theirs()
            rounds.append((ours(), second))
        else:
            rounds.append((ours(), theirs()))
    return rounds
