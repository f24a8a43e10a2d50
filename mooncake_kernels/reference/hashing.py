"""The specification of block names: the chain, block by block, with Python's xxhash package."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import xxhash


def block_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    cu_seqlens: Sequence[int] | None = None,
    parents: Sequence[int | None] | None = None,
    extra_keys: Sequence[Any] | None = None,
    block_extra_keys: Sequence[Sequence[Any] | None] | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Name every full block of every sequence; see ``mooncake_kernels.block_hashes``."""
    starts = [0, len(tokens)] if cu_seqlens is None else list(cu_seqlens)
    of_block, of_chain, of_extra = (
        seed_of(purpose, seed) for purpose in (b"mk.block", b"mk.chain", b"mk.extra")
    )
    keys = []
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        parent = None if parents is None else parents[sequence]
        whole = as_tuple(None if extra_keys is None else extra_keys[sequence])
        blocks = None if block_extra_keys is None else block_extra_keys[sequence]
        for i, first in enumerate(range(begin, end - block_size + 1, block_size)):
            block = np.array(tokens[first : first + block_size], dtype="<u4")
            local = xxhash.xxh3_64_intdigest(block.tobytes(), seed=of_block)
            link = [parent or 0, local, 0, int(parent is not None)]
            own = as_tuple(None if blocks is None else blocks[i])
            if whole or own:
                encoded = encode_extra_key(whole) + encode_extra_key(own)
                link[2] = xxhash.xxh3_64_intdigest(encoded, seed=of_extra)
                link[3] += 2
            parent = xxhash.xxh3_64_intdigest(np.array(link, "<u8").tobytes(), seed=of_chain)
            keys.append(parent)
    return np.array(keys, dtype=np.uint64)


def seed_of(purpose: bytes, seed: int) -> int:
    """The seed of one of the three hashes, for the caller's seed."""
    return xxhash.xxh3_64_intdigest(purpose + seed.to_bytes(8, "little"))


def as_tuple(entry: Any) -> tuple[Any, ...]:
    """An entry of extra keys: None is an empty one, a single value a tuple of itself."""
    if entry is None:
        return ()
    return tuple(entry) if isinstance(entry, list | tuple) else (entry,)


def encode_extra_key(value: Any) -> bytes:
    """A kind (n, t, s, b, i) and, but for None, a count (u64) of items or bytes, and these.

    An integer is its decimal digits, a str its UTF-8.
    """
    if value is None:
        return b"n"
    if isinstance(value, list | tuple):
        return b"t" + len(value).to_bytes(8, "little") + b"".join(map(encode_extra_key, value))
    if isinstance(value, str):
        kind, content = b"s", value.encode()
    elif isinstance(value, bytes):
        kind, content = b"b", value
    else:
        kind, content = b"i", str(int(value)).encode()
    return kind + len(content).to_bytes(8, "little") + content
