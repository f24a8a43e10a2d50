"""Tiers of small buckets, and objects that identify their key."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mooncake_kernels.pool import Key, PutResult
from mooncake_serving.store.ssd import SsdTier

from ..support import content

BUCKET = 64 << 10  # the least that there is
PAGE = 4096
SIZES = [0, 1, 100, 4095, 4096, 4097, 12_288, 20_000]
LARGEST = BUCKET - 4 * PAGE  # `max_object_bytes`
LARGE = 100  # scope of keys whose objects take most of a bucket


LARGE_BUCKET = 128 << 10
LARGE_KEYS = [(i, 0) for i in range(2, 8)]


def size_of(key: Key) -> int:
    """Each key has an object of its own size."""
    if key[1] == LARGE:
        return LARGEST - key[0] % 4 * 2 * PAGE
    return SIZES[(key[0] + key[1]) % len(SIZES)]


def value(key: Key) -> np.ndarray:
    return content(key, size_of(key))


def open_tier(path: Path, num_buckets: int = 8, **options) -> SsdTier:
    options = {"bucket_bytes": BUCKET, "slot_bytes": 2 * PAGE, **options}
    return SsdTier(path, num_buckets * options["bucket_bytes"], **options)


def put(tier: SsdTier, *keys: Key) -> list[PutResult]:
    return tier.put_each(keys, [value(key) for key in keys])


def read(tier: SsdTier, *keys: Key, verify: bool = True) -> set[Key]:
    """The keys of the objects present, each equal to what was put."""
    buffers = [np.full(LARGEST, 7, np.uint8) for _ in keys]
    sizes = tier.get_into_each(keys, buffers, verify=verify)
    for key, buffer, size in zip(keys, buffers, sizes.tolist(), strict=True):
        if size >= 0:
            np.testing.assert_array_equal(buffer[:size], value(key))
            assert (buffer[size:] == 7).all()
    return {key for key, size in zip(keys, sizes.tolist(), strict=True) if size >= 0}


def keys_of(tier: SsdTier) -> set[Key]:
    return set(map(tuple, tier.keys().tolist()))


def open_large(path: Path) -> SsdTier:
    """A tier whose first bucket has room for all LARGE_KEYS."""
    return open_tier(path, 4, bucket_bytes=LARGE_BUCKET)


def make_large(path: Path, sealed: bool = False) -> dict:
    """Put all LARGE_KEYS; return where their records are. Without a footer, as after a death."""
    with open_large(path) as tier:
        put(tier, *LARGE_KEYS)
        where = {key: tier._index.find(key).record for key in LARGE_KEYS}
        image = path.read_bytes()
    if not sealed:
        path.write_bytes(image)
    return where


@contextlib.contextmanager
def no_writes_from(offset: int) -> Iterator[None]:
    """Make writes of this process to files beyond that offset fail with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (offset, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
