"""Recently found locations of objects, so that a lookup followed by a read asks only once."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable

import numpy as np

from ..directory import Holders
from .directory_entries import words_of

MAX_REMEMBERED = 65_536  # objects: about 20 MB
NOWHERE: tuple[tuple[str, ...], float] = ((), 0.0)


class Locations:
    """Pools of objects, as the directory last reported them. Thread-safe.

    A remembered location may be outdated, like everything in a directory: a pool that does not have
    the object says so, and then ``find`` is called with ``anew``.

    Args:
        ask: the directory: for ``[n, 2]`` keys the names of the pools of each.
        valid_s: for how long an answer is remembered.
    """

    def __init__(self, ask: Callable[[np.ndarray], Holders], valid_s: float):
        self._ask = ask
        self._valid_s = valid_s
        self._found: OrderedDict[bytes, tuple[tuple[str, ...], float]] = OrderedDict()
        self._lock = threading.Lock()

    def find(self, keys: np.ndarray, *, anew: bool = False) -> tuple[Holders, list[bool]]:
        """Return where objects are; the directory is asked for those that are not remembered.

        Returns:
            For each key the names of pools, and n of bool: whether that was remembered.

        Raises:
            Unavailable: the directory is away.
        """
        now = time.monotonic()
        pools: Holders = [()] * len(keys)
        is_remembered = [False] * len(keys)
        if not anew:
            with self._lock:
                for i, word in enumerate(words_of(keys)):
                    names, until = self._found.get(word, NOWHERE)
                    if now < until:
                        pools[i], is_remembered[i] = names, True
        if asked := [i for i, known in enumerate(is_remembered) if not known]:
            answers = self._ask(keys[asked])
            self.remember(keys[asked], answers)
            for i, names in zip(asked, answers, strict=True):
                pools[i] = names
        return pools, is_remembered

    def only_pool(self, keys: np.ndarray) -> str | None:
        """Return the pool that has all of some objects, if it is remembered that no other has any
        of them.
        """
        now = time.monotonic()
        pools: tuple[str, ...] = ()
        with self._lock:
            for word in words_of(keys):
                names, until = self._found.get(word, NOWHERE)
                if now >= until or len(names) != 1 or (pools and names != pools):
                    return None
                pools = names
        return pools[0] if pools else None

    def knows_any(self, keys: np.ndarray) -> bool:
        """Whether it is remembered of any object that a pool has it."""
        now = time.monotonic()
        with self._lock:
            for word in words_of(keys):
                if now < self._found.get(word, NOWHERE)[1]:
                    return True
        return False

    def remember(self, keys: np.ndarray, pools: Holders) -> None:
        """Remember where objects are; objects without a location are forgotten."""
        until = time.monotonic() + self._valid_s
        with self._lock:
            for word, names in zip(words_of(keys), pools, strict=True):
                self._found.pop(word, None)
                if names:
                    self._found[word] = (names, until)
            while len(self._found) > MAX_REMEMBERED:
                self._found.popitem(last=False)

    def forget_pool(self, pool: str) -> None:
        """Forget all that a pool was said to have."""
        with self._lock:
            gone = [word for word, (names, _) in self._found.items() if pool in names]
            for word in gone:
                del self._found[word]

    def forget(self, keys: np.ndarray) -> None:
        with self._lock:
            for word in words_of(keys):
                self._found.pop(word, None)
