"""Content that identifies its key, processes, and what must hold of a pool at the end."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np

from mooncake_kernels.pool import Key, ObjectPool, PutResult

from ..waiting import WAIT_S
from ..waiting import eventually as eventually

STORED, EXISTS, BEING_WRITTEN = PutResult.STORED, PutResult.EXISTS, PutResult.BEING_WRITTEN
FULL, OVER_QUOTA = PutResult.FULL, PutResult.OVER_QUOTA


def content(key: Key, num_bytes: int) -> np.ndarray:
    """The bytes of an object, which identify its key, its size and their place."""
    seed = (key[0] * 0x9E3779B97F4A7C15 ^ key[1] ^ int(num_bytes) << 40) % 2**64
    words = np.arange((num_bytes + 7) // 8, dtype=np.uint64) + np.uint64(seed)
    words *= np.uint64(0xD6E8FEB86659FD93)
    return (words ^ (words >> np.uint64(29))).view(np.uint8)[:num_bytes]


def put(pool: ObjectPool, key: Key, num_bytes: int, **options) -> PutResult:
    return pool.put_from(key, content(key, num_bytes), **options)


def check(pool: ObjectPool) -> int:
    """Nothing is left of dead processes, each object is whole; return how many there are."""
    pool.reap()
    stats = pool.stats()
    assert (stats.num_writing, stats.num_doomed, stats.num_pins) == (0, 0, 0)
    assert stats.num_processes == 1
    objects, used = pool.objects(), 0
    for (first, second), num_bytes in zip(objects.keys.tolist(), objects.num_bytes, strict=True):
        with pool.pin((first, second)) as pinned:
            pinned.verify()
            expected = content((first, second), int(num_bytes))
            np.testing.assert_array_equal(np.frombuffer(pinned.to_bytes(), np.uint8), expected)
        used += max(1, -(-int(num_bytes) // pool.alignment)) * pool.alignment
    assert len(objects.keys) == stats.num_ready
    assert used + stats.free_bytes == stats.capacity_bytes
    return stats.num_ready


@contextlib.contextmanager
def child(life: Callable[[], None]) -> Iterator[int]:
    """A forked process that runs this, and is killed at the end unless it exits by itself."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            life()
            status = 0
        finally:
            os._exit(status)
    try:
        yield pid
    finally:
        kill(pid)


def kill(pid: int) -> None:
    """Kill it with SIGKILL and wait for it, unless already done."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def ended_well(pid: int) -> bool:
    """Wait for a child to exit."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.005)
    raise AssertionError("it did not end")
