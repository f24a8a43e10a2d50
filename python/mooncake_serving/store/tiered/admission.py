"""Which objects are worth a write to the disk: those that were used more than once."""

import numpy as np

NUM_ROWS = 4
MAX_COUNT = 15
ADDS_PER_KEY = 8  # after which all counts are halved
FACTORS = np.array(
    [0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0xD6E8FEB86659FD93], np.uint64
)


class UseSketch:
    """How often keys were used recently, or slightly more: a count-min sketch that ages.

    As in TinyLFU (Einziger et al., ACM Transactions on Storage 2017). Racing threads may lose a
    count.

    Args:
        num_keys: number of keys that are told apart well; each takes 16 bytes.
    """

    def __init__(self, num_keys: int):
        bits = max(8, (4 * num_keys - 1).bit_length())
        self._counts = np.zeros((NUM_ROWS, 1 << bits), np.uint8)
        self._shift = np.uint64(64 - bits)
        self._limit = ADDS_PER_KEY * num_keys
        self._num_adds = 0

    def add(self, keys: np.ndarray) -> None:
        """Count a use of each of ``[n, 2]`` uint64 keys."""
        for row, places in zip(self._counts, self._places(keys), strict=True):
            row[places] = np.minimum(row[places] + 1, MAX_COUNT)
        self._num_adds += len(keys)
        if self._num_adds >= self._limit:
            self._counts >>= 1
            self._num_adds = 0

    def estimate(self, keys: np.ndarray) -> np.ndarray:
        """How often each of ``[n, 2]`` keys was used: ``[n]`` uint8, at most 15."""
        rows = [row[p] for row, p in zip(self._counts, self._places(keys), strict=True)]
        return np.min(rows, axis=0)

    def _places(self, keys: np.ndarray) -> np.ndarray:
        mixed = keys[:, 0] ^ (keys[:, 1] * FACTORS[0])
        mixed ^= mixed >> np.uint64(32)
        return (mixed * FACTORS[:, None]) >> self._shift
