"""Which objects this node may write: asks the directory, and keeps its own threads apart."""

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable

import numpy as np

from mooncake_kernels.errors import Unavailable

from ..directory import Claim, Directory, NotAMember
from .listing import Listing, in_parts, words_of

logger = logging.getLogger(__name__)

GRANTED, _, TAKEN, LISTED = map(int, Claim)  # looking up an enum's members is slow


class Claims:
    """Claims of a node. Thread-safe. Keys are ``[n, 2]`` uint64.

    To the directory all threads of a node are one member, which may claim again what it has. So
    what one of them is writing is refused to the others here.

    Args:
        directory: decides among nodes.
        member: name of this one.
        listing: of its pool, which publishes what was stored.
        rejoin: is called if the directory does not know the member; then it is asked again.
    """

    def __init__(
        self, directory: Directory, member: str, listing: Listing, rejoin: Callable[[], object]
    ):
        self._directory = directory
        self._member = member
        self._listing = listing
        self._rejoin = rejoin
        self._writing: set[bytes] = set()
        self._dropped: deque[np.ndarray] = deque()
        self._lock = threading.Lock()

    def ask(self, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        """Ask to write objects that are not in the pool: ``[n]`` of ``Claim``.

        Granted claims must be settled. A key that is named twice is granted once.

        Raises:
            Unavailable: the directory is away; nothing is claimed for longer than ``ttl_s``.
        """
        words = words_of(keys)
        asked = []
        with self._lock:
            for i, word in enumerate(words):
                if word not in self._writing:
                    self._writing.add(word)
                    asked.append(i)
        claims = np.full(len(words), TAKEN, np.int8)
        try:
            claims[asked] = self._ask(keys[asked], ttl_s)
        finally:
            is_granted = (claims == GRANTED).tolist()
            self._forget(words[i] for i in asked if not is_granted[i])
        return claims

    def renew(self, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        """Renew granted claims that may have run out: ``[n]`` of ``Claim``.

        Raises:
            Unavailable: as in ``ask``.
        """
        return self._ask(keys, ttl_s)

    def settle(self, keys: np.ndarray, is_published: np.ndarray | bool = False) -> None:
        """End granted claims. Objects that are in this node's pool now are published, whoever put
        them there; for the rest ``[n]`` bool says which were published for another pool, which
        ended the claim.
        """
        try:
            is_here = self._listing.publish(keys)
            for part in in_parts(keys[~(is_here | is_published)]):
                self._directory.abandon(self._member, part)
        except Unavailable as error:
            logger.warning("claims stay until they run out: %s", error)
        finally:
            self._forget(words_of(keys))

    def drop(self, keys: np.ndarray) -> None:
        """Have granted claims ended by the next ``settle_dropped``. It takes no lock and may be
        called at any moment, as finalizers are.
        """
        self._dropped.append(keys)

    def settle_dropped(self) -> None:
        """End the claims that were dropped: by the next put, or when the node is next renewed."""
        if not self._dropped:  # usually
            return
        words: list[np.ndarray] = []
        with contextlib.suppress(IndexError):  # also if another thread takes the last one
            while self._dropped:
                words.append(self._dropped.popleft())
        if words:
            self.settle(np.concatenate(words))

    def _ask(self, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        claims = self._ask_directory(keys, ttl_s)
        listed = np.flatnonzero(claims == LISTED)
        if len(listed):
            went = listed[self._listing.withdraw_gone(keys[listed])]
            claims[went] = self._ask_directory(keys[went], ttl_s)
            is_left = claims == LISTED  # by now it is here again, or is being written
            is_here = self._listing.has_keys(keys[is_left])
            claims[is_left] = np.where(is_here, Claim.EXISTS, Claim.TAKEN)
        return claims

    def _ask_directory(self, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        try:
            return self._claim(keys, ttl_s)
        except NotAMember:
            self._rejoin()
            return self._claim(keys, ttl_s)

    def _claim(self, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        claims = [self._directory.claim(self._member, part, ttl_s) for part in in_parts(keys)]
        return np.concatenate(claims) if claims else np.empty(0, np.int8)

    def _forget(self, words: Iterable[bytes]) -> None:
        with self._lock:
            self._writing.difference_update(words)
