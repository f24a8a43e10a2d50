"""How often blocks are asked for, with the past forgotten bit by bit."""

import math
from collections.abc import Iterable

from ..errors import check_positive


class Heat:
    """Requests a second for each block, of which those ``half_life_s`` ago count half.

    Args:
        half_life_s: the longer, the steadier, and the later a change shows.
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
        for key in keys:
            self._rates[key] = (self.rate(key, now_s) + self._decay, now_s)

    def rate(self, key: int, now_s: float) -> float:
        """Tell how many requests a second ask for a block; 0 if none is remembered.

        Requests at a steady rate come to be told as that rate.
        """
        rate, at_s = self._rates.get(key, (0.0, now_s))
        return rate * math.exp(-self._decay * max(now_s - at_s, 0.0))

    def forget_below(self, rate: float, now_s: float) -> None:
        """Forget blocks that are asked for less often than ``rate``: call it now and then."""
        cold = [key for key in self._rates if self.rate(key, now_s) < rate]
        for key in cold:
            del self._rates[key]
