"""Which objects that are read from other hosts are copied to the host that reads them."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from ..checks import check_callable, check_integer, check_not_negative
from .heat import UseCounts, mix

MAX_COOLING = 1 << 16


class HotKeys:
    """Chooses what to copy here because it is read from other hosts repeatedly. Thread-safe.

    The paper's hot-spot migration copies blocks to where requests are sent (FAST'25, Algorithm 1).
    This one does so for whatever is read, keeps the number of copies small, and does not make
    copies again and again where they are soon evicted.

    Args:
        min_reads: how often an object must be read from other hosts, as ``UseCounts`` counts: more
            than that many times within a half life or two.
        max_copies: an object with this many copies gets no more.
        cooldown_s: an object that was chosen is not chosen again for this long.
        half_life_s: of the count.
        clock: seconds, which never go back.

    Raises:
        InvalidArgument: a number is out of range.
    """

    def __init__(
        self,
        min_reads: float = 4.0,
        *,
        max_copies: int = 3,
        cooldown_s: float = 30.0,
        half_life_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ):
        check_not_negative("HotKeys", "min_reads", min_reads)
        check_integer("HotKeys", "max_copies", max_copies, 1)
        check_not_negative("HotKeys", "cooldown_s", cooldown_s)
        check_callable("HotKeys", "clock", clock)
        self._min_reads = min_reads
        self._max_copies = max_copies
        self._cooldown_s = cooldown_s
        self._uses = UseCounts(half_life_s, clock=clock)
        self._clock = clock
        self._cooling = OrderedDict[int, float]()  # hashes, and until when; ordered by time
        self._lock = threading.Lock()

    def read(self, keys: np.ndarray, num_copies: np.ndarray) -> np.ndarray:
        """Count reads from other hosts, and choose what to copy here.

        Args:
            keys: ``[n, 2]`` uint64 of objects that were just read from other hosts.
            num_copies: ``[n]``, how many pools have each, or one number for all.

        Returns:
            ``[n]`` bool: which shall be copied here now. They count as chosen.
        """
        few = np.asarray(num_copies) < self._max_copies
        chosen = (self._uses.add(keys) > self._min_reads) & few
        if chosen.any():
            indices = np.flatnonzero(chosen)
            hashes = mix(keys[indices]).tolist()
            chosen[indices] = self._start_cooldown(hashes)
        return chosen

    def _start_cooldown(self, hashes: list[int]) -> list[bool]:
        """Return which were not cooling down, and start their cooldown."""
        now_s = self._clock()
        with self._lock:
            self._forget(now_s)
            started = []
            for key in hashes:
                started.append(key not in self._cooling)
                self._cooling.setdefault(key, now_s + self._cooldown_s)
            return started

    def _forget(self, now_s: float) -> None:
        """Forget those whose cooldown is over; if there are too many, also the oldest others."""
        cooling = self._cooling
        while cooling and (next(iter(cooling.values())) <= now_s or len(cooling) > MAX_COOLING):
            cooling.popitem(last=False)
