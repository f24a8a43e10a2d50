"""Objects of a pool in shared memory: copied in and out against memcpy, looked up against a dict.

Objects were put by another process, 16 MiB of each size. A call moves one object, or as many as
make up 1 MiB, and the next call the next ones. memcpy is numpy's, row by row, between private
memory and shared memory such as the pool's. "put" puts objects and removes them again. "checked"
compares, or computes, XXH3-64 of every byte.
"""

import os
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from harness import Case, arguments
from table import report
from turns import Turns

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


def copies(pool: ObjectPool, name: str, size: int) -> Iterator[Case]:
    count, each = TOTAL // size, max(1, CALL // size)
    keys = [tuple(key) for key in object_keys(np.arange(count), name).tolist()]
    shared = shared_memory(TOTAL).numpy().reshape(count, size)  # like a pool's memory
    shared[:] = np.random.default_rng(1).integers(0, 256, shared.shape, np.uint8)
    private = np.zeros_like(shared)
    out, back = Turns(count, each), Turns(count, each)

    def fill() -> None:
        with ObjectPool.open(pool.path) as own:
            for key, row in zip(keys, shared, strict=True):
                assert own.put_from(key, row) is PutResult.STORED

    in_another_process(fill)

    def memcpy_out() -> None:
        for i in out.take():
            np.copyto(private[i], shared[i])

    def memcpy_in() -> None:
        for i in back.take():
            np.copyto(shared[i], private[i])

    def get(verify: bool) -> None:
        for i in out.take():
            pool.get_into(keys[i], private[i], verify=verify)

    def get_each() -> None:
        part = out.take()
        pool.get_into_each(keys[part.start : part.stop], private[part.start : part.stop])

    def get_pieces() -> None:
        for i in out.take():
            pool.get_into(keys[i], *private[i].reshape(-1, PIECE))

    def put(checksum: bool) -> None:
        part = back.take()
        for i in part:
            pool.put_from((i, 0), private[i], checksum=checksum)
        for i in part:
            pool.remove((i, 0))

    def check_get(call: Callable[[], None]) -> Callable[[], None]:
        def check() -> None:
            private[:] = 0
            for _ in out.parts:
                call()
            assert np.array_equal(private, shared), "wrong: not timed"

        return check

    def check_put() -> None:
        pool.put_from((0, 0), private[0])
        with pool.pin((0, 0)) as pinned:
            pinned.verify()
            assert bytes(pinned.view) == private[0].tobytes(), "wrong: not timed"
        pool.remove((0, 0))

    kinds = {"get_into": lambda: get(False), "get_into, checked": lambda: get(True)}
    if each > 1:
        kinds["get_into_each"] = get_each
    if size == 1 << 20:
        kinds[f"get_into {size // PIECE} pieces"] = get_pieces
    title, num_bytes = f"{each} x {name}", 2 * each * size
    for kind, call in kinds.items():
        baseline = {"memcpy": memcpy_out}
        yield Case(f"{kind}: {title}", call, baseline, check_get(call), num_bytes)
    for kind, checksum in {"put_from, remove": False, "put_from, remove, checked": True}.items():
        call = partial(put, checksum)
        yield Case(f"{kind}: {title}", call, {"memcpy": memcpy_in}, check_put, num_bytes)
    for key in keys:
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
