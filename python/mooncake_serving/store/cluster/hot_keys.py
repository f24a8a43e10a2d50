"""Which objects that are read from other hosts are copied to the host that reads them: hot keys."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from mooncake_kernels.errors import InvalidArgument

from ..checks import check_callable, check_integer, check_not_negative, check_positive

MAX_HALF_LIVES = 64  # before counts are scaled down, long before a float64 overflows
LOW = np.uint64(0xFFFFFFFF)
ROWS = np.arange(4, dtype=np.uint64)[:, None]
MAX_COOLING = 1 << 16


class UseCounts:
    """Uses of each object, of which those ``half_life_s`` ago count half. Thread-safe.

    A count-min sketch (Cormode and Muthukrishnan, 2005): its memory is 32 bytes times ``width``
    however many objects there are, and it never undercounts. It overcounts by less than ``e /
    width`` of all remembered uses, for all but 1 of 55 objects; in practice by far less, since a
    use increments only the smallest counters (conservative update, Estan and Varghese, 2002). Uses
    are not aged one by one: later ones weigh more (forward decay, Cormode et al., 2009).

    To find what is used again, compare: ``counts.add(keys) >= 1.5`` is true of objects that were
    used before, and less than a half life ago.

    Args:
        half_life_s: a longer one is steadier, and shows changes later.
        width: counters of each of 4 rows, a power of two; at least as many as objects are used in a
            few half lives.
        clock: seconds, which never go back.

    Raises:
        InvalidArgument: a number is out of range.
    """

    def __init__(
        self,
        half_life_s: float = 60.0,
        *,
        width: int = 1 << 16,
        clock: Callable[[], float] = time.monotonic,
    ):
        check_positive("UseCounts", "half_life_s", half_life_s)
        if not isinstance(width, int) or not 1 < width <= 1 << 31 or width & (width - 1):
            raise InvalidArgument(f"UseCounts: width must be a power of two >= 2, got {width!r}")
        self._half_life_s = half_life_s
        self._clock = clock
        self._since_s = clock()  # a use at this time weighs 1
        self._counters = np.zeros(4 * width)
        self._lock = threading.Lock()

    def add(self, keys: np.ndarray) -> np.ndarray:
        """Count one use of each object, and return the counts.

        Args:
            keys: ``[n, 2]`` uint64, as pools have them; a key named twice counts once.

        Returns:
            ``[n]`` float64: uses of each, including this one.
        """
        cells = self._cells(mix(keys))
        with self._lock:
            weight = self._weight()
            counts = self._counters[cells].min(axis=0) + weight
            np.maximum.at(self._counters, cells.ravel(), np.tile(counts, 4))
        return counts / weight

    def counts(self, keys: np.ndarray) -> np.ndarray:
        """Return the uses of each of ``[n, 2]`` objects, ``[n]`` float64, without counting one."""
        cells = self._cells(mix(keys))
        with self._lock:
            weight = self._weight()
            return self._counters[cells].min(axis=0) / weight

    def _weight(self) -> float:
        """Weight of a use now, relative to one at the start."""
        half_lives = max(self._clock() - self._since_s, 0.0) / self._half_life_s
        if half_lives > MAX_HALF_LIVES:
            self._counters *= 2.0**-half_lives
            self._since_s += half_lives * self._half_life_s
            half_lives = 0.0
        return 2.0**half_lives

    def _cells(self, hashes: np.ndarray) -> np.ndarray:
        """``[4, n]`` counter indices: 4 hashes made of two (Kirsch and Mitzenmacher, 2006)."""
        width = len(self._counters) // 4
        first, second = hashes & LOW, (hashes >> np.uint64(32)) | np.uint64(1)
        columns = (first + ROWS * second) & np.uint64(width - 1)
        return (columns + ROWS * np.uint64(width)).view(np.int64)


def mix(keys: np.ndarray) -> np.ndarray:
    """Hash keys, whose words may be small numbers, to ``[n]`` uint64."""
    words = keys[:, 0] * np.uint64(0x9E3779B97F4A7C15) ^ keys[:, 1]
    for factor in (0xBF58476D1CE4E5B9, 0x94D049BB133111EB):  # SplitMix64 (Steele et al., 2014)
        words = (words ^ (words >> np.uint64(31))) * np.uint64(factor)
    return words ^ (words >> np.uint64(32))


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
