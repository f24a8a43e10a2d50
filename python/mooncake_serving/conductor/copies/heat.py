"""How often blocks are requested, with older requests gradually forgotten."""

import math
from collections.abc import Iterable

from ..errors import check_finite, check_positive, listed


class Heat:
    """Requests per second for each block, of which those ``half_life_s`` ago count half.

    Args:
        half_life_s: a longer one is steadier, and shows changes later.
    """

    def __init__(self, half_life_s: float = 60.0) -> None:
        check_positive("Heat", "half_life_s", half_life_s)
        self._decay = math.log(2) / half_life_s
        self._rates: dict[int, tuple[float, float]] = {}

    def __len__(self) -> int:
        """Count the blocks that are remembered."""
        return len(self._rates)

    def touch(self, keys: Iterable[int], now_s: float) -> None:
        """Count one request for each block."""
        keys = listed("touch", keys)
        check_finite("touch", "now_s", now_s)
        for key in keys:
            self._rates[key] = (self.rate(key, now_s) + self._decay, now_s)

    def rate(self, key: int, now_s: float) -> float:
        """Return how many requests per second ask for a block; 0 if none is remembered.

        For requests at a steady rate it converges to that rate.
        """
        rate, at_s = self._rates.get(key, (0.0, now_s))
        return rate * math.exp(-self._decay * max(now_s - at_s, 0.0))

    def forget_below(self, rate: float, now_s: float) -> None:
        """Forget blocks requested less often than ``rate``: call it from time to time."""
        check_finite("forget_below", "rate", rate)
        check_finite("forget_below", "now_s", now_s)
        cold = [key for key in self._rates if self.rate(key, now_s) < rate]
        for key in cold:
            del self._rates[key]
