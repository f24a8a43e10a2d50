"""The specification of block names: the chain, block by block, with Python's xxhash package."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import xxhash


def block_hashes(
    tokens: Sequence[int],
    block_size: int,
    *,
    cu_seqlens: Sequence[int] | None = None,
    parents: Sequence[int | None] | None = None,
    seed: int = 0,
) -> np.ndarray:
    """Name every full block of every sequence; see ``mooncake_kernels.block_hashes``."""
    starts = [0, len(tokens)] if cu_seqlens is None else list(cu_seqlens)
    keys = []
    for sequence, (begin, end) in enumerate(pairwise(starts)):
        previous = None if parents is None else parents[sequence]
        for first in range(begin, end - block_size + 1, block_size):
            block = np.array(tokens[first : first + block_size], dtype="<u4")
            key = xxhash.xxh3_64_intdigest(block.tobytes(), seed=seed)
            if previous is not None:
                pair = np.array([previous, key], dtype="<u8")
                key = xxhash.xxh3_64_intdigest(pair.tobytes(), seed=seed)
            keys.append(key)
            previous = key
    return np.array(keys, dtype=np.uint64)
