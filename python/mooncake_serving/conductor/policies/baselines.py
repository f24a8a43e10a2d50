"""The paper's baselines: random, round robin, load balance, cache-aware.

Mooncake, FAST'25 figure 5, and arXiv 2407.00079 figure 8.
"""

from dataclasses import dataclass

import numpy as np

from ..decision import PrefillChoice
from ..reasons import Why
from .view import PrefillView


@dataclass(frozen=True, slots=True)
class Random:
    """Any instance, all equally likely; determined by the conductor's seed."""

    def choose(self, view: PrefillView) -> PrefillChoice:
        """Choose one of ``view.candidates``."""
        position = int(view.rng.integers(len(view.candidates)))
        return view.choose_local(position, Why.RANDOM, candidates=len(view.candidates))


@dataclass(slots=True)
class RoundRobin:
    """The next instance after the previous choice, by number."""

    last: int = -1

    def choose(self, view: PrefillView) -> PrefillChoice:
        """Choose one of ``view.candidates``."""
        behind = int(np.searchsorted(view.candidates, self.last, side="right"))
        position = behind % len(view.candidates)
        self.last = int(view.candidates[position])
        return view.choose_local(position, Why.ROUND_ROBIN, candidates=len(view.candidates))


@dataclass(frozen=True, slots=True)
class LoadBalance:
    """The instance with the least load; its cache does not matter."""

    def choose(self, view: PrefillView) -> PrefillChoice:
        """Choose one of ``view.candidates``."""
        return view.choose_local(int(view.wait_s.argmin()), Why.SHORTEST_QUEUE)


@dataclass(frozen=True, slots=True)
class LocalCacheAware:
    """The instance with the shortest TTFT by its own cache; nothing is ever fetched."""

    def choose(self, view: PrefillView) -> PrefillChoice:
        """Choose one of ``view.candidates``."""
        return view.choose_local(int(view.local_ttft_s().argmin()), Why.LOCAL_CACHE)
