"""How often blocks are requested, with older requests gradually forgotten."""

import math
from collections import OrderedDict
from collections.abc import Iterable

from ..errors import check_count, check_finite, check_positive, listed


class Heat:
    """Requests per second for each block, of which those ``half_life_s`` ago count half.

    Args:
        half_life_s: a longer one is steadier, and shows changes later.
        max_blocks: that are remembered: those requested last. A block that is requested again
            before so many others loses nothing.
    """

    def __init__(self, half_life_s: float = 60.0, *, max_blocks: int = 1 << 17) -> None:
        check_positive("Heat", "half_life_s", half_life_s)
        check_count("Heat", "max_blocks", max_blocks, 1)
        self._decay = math.log(2) / half_life_s
        self._max_blocks = max_blocks
        self._rates: OrderedDict[int, tuple[float, float]] = OrderedDict()

    def __len__(self) -> int:
        """Count the blocks that are remembered."""
        return len(self._rates)

    def touch(self, keys: Iterable[int], now_s: float) -> None:
        """Count one request for each block."""
        keys = listed("touch", keys)
        check_finite("touch", "now_s", now_s)
        rates = self._rates
        for key in keys:
            rates[key] = (self.rate(key, now_s) + self._decay, now_s)
            rates.move_to_end(key)
        while len(rates) > self._max_blocks:
            rates.popitem(last=False)

    def rate(self, key: int, now_s: float) -> float:
        """Return how many requests per second ask for a block; 0 if none is remembered.

        For requests at a steady rate it converges to that rate.
        """
        rate, at_s = self._rates.get(key, (0.0, now_s))
        return rate * math.exp(-self._decay * max(now_s - at_s, 0.0))
