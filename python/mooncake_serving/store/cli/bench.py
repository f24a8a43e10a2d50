"""``bench``: speed of a pool on this machine, by object size."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from mooncake_kernels.pool import Evicted, ObjectPool, PutResult

from ..eviction.policy import pool_bytes
from ..store import Store
from .options import Failed, add_command, add_trust, as_bytes, as_seconds, open_pool

NAMESPACE = "mooncake-store bench"
OPERATIONS = ("put", "get", "get_into", "view")
MAX_OBJECTS = 256


def add_commands(commands: Any) -> None:
    """Declare the command."""
    parser = add_command(
        commands, "bench", run, "Measure a pool of this host from this process.",
        "bench --sizes 64KiB,1MiB --ops put,get_into",
    )  # fmt: skip
    parser.add_argument(
        "path", nargs="?", metavar="PATH",
        help="of the pool, of which what is free is used (default: a new one)",
    )  # fmt: skip
    add_trust(parser)
    parser.add_argument(
        "--capacity", type=as_bytes, default=256 << 20, metavar="SIZE",
        help="of the new pool (default: 256MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--sizes", type=_sizes, default=[64 << 10, 1 << 20], metavar="SIZE,...",
        help="of objects (default: 64KiB,1MiB)",
    )  # fmt: skip
    parser.add_argument(
        "--ops", type=_operations, default=list(OPERATIONS), metavar="OP,...",
        help=f"of {', '.join(OPERATIONS)} (default: all)",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=as_seconds, default=1.0, metavar="S", help="each, at least (default: 1)"
    )
    parser.add_argument("--json", action="store_true", help="a list of objects")


def run(options: argparse.Namespace) -> None:
    pool = (
        ObjectPool.create(options.capacity)
        if options.path is None
        else open_pool(options, options.path)
    )
    rows = []
    with Store(pool, namespace=NAMESPACE, eviction=_evict_nothing) as store:
        for num_bytes in options.sizes:
            rows += measure(store, num_bytes, options.ops, options.seconds)
    if options.json:
        json.dump(rows, sys.stdout)
        sys.stdout.write("\n")
        return
    from rich.table import Table

    from .stat import console, size

    table = Table("operation", "size", "GB/s", "operations/s")
    for row in rows:
        speed = "" if row["gb_per_s"] is None else f"{row['gb_per_s']:.2f}"
        table.add_row(row["operation"], size(row["num_bytes"]), speed, f"{row['ops_per_s']:,.0f}")
    console().print(table)


def measure(
    store: Store, num_bytes: int, operations: list[str], seconds: float
) -> list[dict[str, Any]]:
    """Measure operations on objects of one size, which are removed at the end.

    Returns:
        For each operation: ``operation``, ``num_bytes``, ``gb_per_s`` (of 10**9 bytes; None for a
        view, which copies nothing), ``ops_per_s``. A put removes the previous object first.

    Raises:
        Failed: two of the objects do not fit into what is free of the pool, or a read returns other
            bytes than were stored.
    """
    stats = store.stats()
    num_free = stats.max_objects - stats.num_ready - stats.num_writing - stats.num_doomed
    room = int(pool_bytes(store.pool, np.array([num_bytes]))[0])
    count = min(MAX_OBJECTS, num_free // 2, stats.free_bytes // room // 2)
    if count == 0:
        raise Failed(
            f"two objects of {num_bytes} bytes do not fit into what is free of the pool, "
            f"{stats.free_bytes} bytes and {num_free} objects"
        )
    value = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    landing = np.empty_like(value)

    def put(key: int) -> None:
        store.remove(key)
        if store.put(key, value) is not PutResult.STORED:
            raise Failed(f"the pool has no room for another {num_bytes} bytes in one part")

    def view(key: int) -> None:
        if (pinned := store.view(key)) is not None:
            pinned.close()

    calls: dict[str, Callable[[int], Any]] = {
        "put": put,
        "get": store.get,
        "get_into": lambda key: store.get_into(key, landing),
        "view": view,
    }
    try:
        for key in range(count):
            put(key)
        _check(store, count, value, landing)
        rates = {name: _rate(calls[name], count, seconds) for name in operations}
    finally:
        for key in range(count):
            store.remove(key)
    return [
        {
            "operation": name,
            "num_bytes": num_bytes,
            "gb_per_s": None if name == "view" else rate * num_bytes / 1e9,
            "ops_per_s": rate,
        }
        for name, rate in rates.items()
    ]


def _evict_nothing(pool: ObjectPool, num_bytes: int) -> Evicted:
    """What others have put stays."""
    return Evicted(np.empty((0, 2), np.uint64), 0)


def _check(store: Store, count: int, value: np.ndarray, landing: np.ndarray) -> None:
    for key in range(count):
        if store.get_into(key, landing) != len(value) or not np.array_equal(landing, value):
            raise Failed(f"object {key} is not what was stored: does somebody else evict it?")


def _rate(call: Callable[[int], Any], count: int, seconds: float) -> float:
    done, start = 0, time.perf_counter()
    while (passed := time.perf_counter() - start) < seconds or done == 0:
        for key in range(count):
            call(key)
        done += count
    return done / passed


def _sizes(text: str) -> list[int]:
    return [as_bytes(one) for one in text.split(",")]


def _operations(text: str) -> list[str]:
    names = text.split(",")
    if not set(names) <= set(OPERATIONS):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(OPERATIONS)}, got {text!r}")
    return names
