"""Objects of a pool in shared memory: copied in and out against memcpy, looked up against a dict.

Objects were put by another process, 16 MiB of each size. A call moves one object, or as many as
make up 1 MiB, and the next call the next ones. memcpy is numpy's, row by row, between private
memory and shared memory such as the pool's. "put" puts objects and removes them again. "checked"
compares, or computes, XXH3-64 of every byte.
"""

import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from lib.harness import Case, arguments
from lib.interleave import Interleave
from lib.table import report
from mooncake_kernels.buffers import shared_memory
from mooncake_kernels.pool import ObjectPool, PutResult, object_keys

TOTAL = 16 << 20
CALL = 1 << 20
SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
PIECE = 16 << 10
NUM_KEYS = 4096  # in the index


def in_another_process(work: Callable[[], None]) -> None:
    pid = os.fork()
    if pid == 0:
        work()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the other process failed"


class Copies:
    """Objects of one size in a pool, the same in memory such as the pool's, and private memory."""

    def __init__(self, pool: ObjectPool, name: str, size: int):
        count, self.each = TOTAL // size, max(1, CALL // size)
        self.pool = pool
        self.keys = [tuple(key) for key in object_keys(np.arange(count), name).tolist()]
        self.shared = shared_memory(TOTAL).numpy().reshape(count, size)
        self.shared[:] = np.random.default_rng(1).integers(0, 256, self.shared.shape, np.uint8)
        self.private = np.zeros_like(self.shared)
        self.out, self.back = Interleave(count, self.each), Interleave(count, self.each)
        in_another_process(self._fill)

    def _fill(self) -> None:
        with ObjectPool.open(self.pool.path) as own:
            for key, row in zip(self.keys, self.shared, strict=True):
                assert own.put_from(key, row) is PutResult.STORED

    def memcpy_out(self) -> None:
        for i in self.out.take():
            np.copyto(self.private[i], self.shared[i])

    def memcpy_in(self) -> None:
        for i in self.back.take():
            np.copyto(self.shared[i], self.private[i])

    def get(self, verify: bool) -> None:
        for i in self.out.take():
            self.pool.get_into(self.keys[i], self.private[i], verify=verify)

    def get_each(self) -> None:
        part = self.out.take()
        rows = self.private[part.start : part.stop]
        self.pool.get_into_each(self.keys[part.start : part.stop], rows)

    def get_pieces(self) -> None:
        for i in self.out.take():
            self.pool.get_into(self.keys[i], *self.private[i].reshape(-1, PIECE))

    def put(self, checksum: bool) -> None:
        part = self.back.take()
        for i in part:
            self.pool.put_from((i, 0), self.private[i], checksum=checksum)
        for i in part:
            self.pool.remove((i, 0))

    def check_get(self, call: Callable[[], None]) -> None:
        self.private[:] = 0
        for _ in self.out.parts:
            call()
        assert np.array_equal(self.private, self.shared), "wrong: not timed"

    def check_put(self) -> None:
        self.pool.put_from((0, 0), self.private[0])
        with self.pool.pin((0, 0)) as pinned:
            pinned.verify()
            assert bytes(pinned.view) == self.private[0].tobytes(), "wrong: not timed"
        self.pool.remove((0, 0))


def copies(pool: ObjectPool, name: str, size: int) -> Iterator[Case]:
    own = Copies(pool, name, size)
    gets = {"get_into": partial(own.get, False), "get_into, checked": partial(own.get, True)}
    if own.each > 1:
        gets["get_into_each"] = own.get_each
    if size == 1 << 20:
        gets[f"get_into {size // PIECE} pieces"] = own.get_pieces
    title, num_bytes = f"{own.each} x {name}", 2 * own.each * size
    for kind, call in gets.items():
        baseline, check = {"memcpy": own.memcpy_out}, partial(own.check_get, call)
        yield Case(f"{kind}: {title}", call, baseline, check, num_bytes)
    for kind, checksum in {"put_from, remove": False, "put_from, remove, checked": True}.items():
        call, baseline = partial(own.put, checksum), {"memcpy": own.memcpy_in}
        yield Case(f"{kind}: {title}", call, baseline, own.check_put, num_bytes)
    for key in own.keys:
        pool.remove(key)


def lookups(pool: ObjectPool) -> Iterator[Case]:
    keys = object_keys(np.arange(NUM_KEYS), "lookups")

    def fill() -> None:
        with ObjectPool.open(pool.path) as own:
            for key in keys.tolist():
                assert own.put_from(tuple(key), b"1") is PutResult.STORED

    in_another_process(fill)
    pairs = [tuple(key) for key in keys.tolist()]
    known = dict.fromkeys(pairs)
    some, prefix = keys[::8].copy(), keys[:256].copy()
    some_pairs, prefix_pairs = pairs[::8], pairs[:256]

    def check() -> None:
        assert pool.match_prefix(keys) == NUM_KEYS and pool.contains_each(keys).all()
        assert not pool.contains((1, 1))

    yield Case(
        "contains: 512 calls",
        lambda: [pool.contains(key) for key in some_pairs],
        {"dict": lambda: [key in known for key in some_pairs]},
        check,
    )
    yield Case(
        "pin, close: 512 calls",
        lambda: [pool.pin(key).close() for key in some_pairs],
        {"dict": lambda: [key in known for key in some_pairs]},
        check,
    )
    yield Case(
        "contains_each: 512 keys",
        lambda: pool.contains_each(some),
        {"dict": lambda: [key in known for key in some_pairs]},
        check,
    )
    yield Case(
        "match_prefix: 256 keys",
        lambda: pool.match_prefix(prefix),
        {"dict": lambda: all(key in known for key in prefix_pairs)},
        check,
    )


def cases(pool: ObjectPool, quick: bool) -> Iterator[Case]:
    yield from lookups(pool)
    for name, size in list(SIZES.items())[: 1 if quick else None]:
        yield from copies(pool, name, size)


if __name__ == "__main__":
    options = arguments(__doc__, without=("device",))
    with ObjectPool.create(4 * TOTAL, num_objects=2 * NUM_KEYS) as pool:
        pool.memory().fill_(0)  # fault the pages in
        report("store", cases(pool, options.quick), options)
