"""Sizes from a byte to a GiB, over each transport, from and to any address: bitwise."""

import functools
from collections.abc import Iterator

import numpy as np
import pytest

from mooncake_kernels.buffers import shared_memory

from .support import UNTOUCHED, engine_pair

MIB, GIB, PAGE = 1 << 20, 1 << 30, 4096
SPARE = 2 * PAGE  # around what is moved
SMALL = [1, 7, 63, PAGE - 1, PAGE, PAGE + 1, 16 * MIB - 1, 16 * MIB, 16 * MIB + 1]
STARTS = [(0, 0), (1, 0), (3, PAGE - 1), (PAGE - 1, PAGE + 1)]  # of source and target
# Every size from two starts, every start with five sizes.
CASES = [(size, STARTS[(i + k) % 4]) for i, size in enumerate(SMALL) for k in (0, 1)]
WAYS = {  # transport, and whether the far memory is mapped
    "local": ("local", False),
    "mapped": ("shm", True),
    "addressed": ("shm", False),
    "tcp": ("tcp", False),
}


@functools.cache
def hashed_words(num_bytes: int) -> np.ndarray:
    """Each word of it hashed from its position: no two are equal."""
    hashed = np.arange(num_bytes // 8, dtype=np.uint64)
    hashed *= np.uint64(0x9E3779B97F4A7C15)
    return hashed.view(np.uint8)


@pytest.fixture(scope="module", autouse=True)
def forget_words() -> Iterator[None]:
    yield
    hashed_words.cache_clear()


@pytest.fixture(scope="module", params=WAYS.values(), ids=WAYS.keys())
def way(request):
    transport, mapped = request.param
    with engine_pair(transport) as pair:
        yield pair, mapped


def chunks(memory: np.ndarray) -> Iterator[np.ndarray]:
    """Parts that stay in the cache: a comparison would make a GiB of booleans."""
    return (memory[at : at + MIB] for at in range(0, memory.nbytes, MIB))


def equal(one: np.ndarray, other: np.ndarray) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(chunks(one), chunks(other), strict=True))


def check(way, direction: str, num_bytes: int, start: tuple[int, int]) -> None:
    pair, mapped = way
    size = num_bytes + SPARE
    source_at, target_at = start
    words = hashed_words(next(most for most in (17 * MIB, GIB + SPARE) if size <= most))
    allocate = (lambda: shared_memory(size).numpy()) if mapped else (lambda: np.empty(size, "u1"))
    if direction == "write":
        near, far = words[:size], allocate()
        source, target = near, far
    else:
        near, far = np.empty(size, np.uint8), allocate() if mapped else words[:size]
        source, target = far, near
        if mapped:
            source[:] = words[:size]
    target[:] = UNTOUCHED
    here, there = pair.regions(near, far)
    with here, there:
        near_at, far_at = start if direction == "write" else start[::-1]
        row = (here.address + near_at, there.address + far_at, num_bytes)
        getattr(pair.near, direction)(pair.peer, [row]).wait()
    end = target_at + num_bytes
    assert equal(target[target_at:end], words[source_at : source_at + num_bytes])
    assert (target[:target_at] == UNTOUCHED).all() and (target[end:] == UNTOUCHED).all()


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize(("num_bytes", "start"), CASES)
def test_sizes(way, direction, num_bytes, start):
    check(way, direction, num_bytes, start)


@pytest.mark.parametrize("direction", ["write", "read"])
def test_quarter_gib_transfer(way, direction):
    check(way, direction, 256 * MIB + 1, (5, 3))


def test_one_gib_transfer(way, soak):
    for direction in ("write", "read") if soak else ("write",):
        check(way, direction, GIB, (PAGE - 1, 1))
