"""Which objects this node may write: claims of keys, and admission to its pool."""

import logging
import threading
import weakref
from collections.abc import Callable, Iterable

import numpy as np

from mooncake_kernels.errors import Unavailable

from ..directory import Claim, Directory, NotAMember
from ..keyspace import words_of
from .directory_entries import DirectoryEntries, in_parts

logger = logging.getLogger(__name__)

# Locked while a block of code runs: others can see that it does. Ctrl-C at any moment leaves none
# behind, because Python enters and leaves a lock's ``with`` block in one step each. A context
# manager written in Python can be interrupted after it has noted that the block begins, or before
# it notes the end.
Guard = threading.Lock

GRANTED, _, TAKEN, LISTED = map(int, Claim)  # looking up an enum's members is slow


class Claims:
    """Claims of a node: grants of the directory, kept apart by thread. Thread-safe. Keys are
    ``[n, 2]`` uint64.

    To the directory all threads of a node are one member, which may claim again what it has. So
    what one of them is writing is refused to the others here, for as long as its guard is locked. A
    claim whose guard is over without ``settle``, after Ctrl-C for example, is ended later.

    Args:
        directory: decides among nodes.
        member: name of this one.
        entries: of its pool, which publishes what was stored.
        rejoin: is called if the directory does not know the member; then it is asked again.
    """

    def __init__(
        self,
        directory: Directory,
        member: str,
        entries: DirectoryEntries,
        rejoin: Callable[[], object],
    ):
        self._directory = directory
        self._member = member
        self._entries = entries
        self._rejoin = rejoin
        self._writing: dict[bytes, weakref.ref[Guard]] = {}
        self._dropped: list[weakref.ref[Guard]] = []
        self._lock = threading.Lock()

    def ask(self, keys: np.ndarray, ttl_s: float, guard: Guard) -> np.ndarray:
        """Ask to write objects that are not in the pool: ``[n]`` of ``Claim``.

        Granted claims must be settled. A key that is named twice is granted once.

        Args:
            keys: ``[n, 2]``.
            ttl_s: for which the directory grants them.
            guard: locked until they are settled, or kept.

        Raises:
            Unavailable: the directory is away; nothing is claimed for longer than ``ttl_s``.
        """
        words = words_of(keys)
        asked = []
        mine = weakref.ref(guard, self._dropped.append)
        with self._lock:
            for i, word in enumerate(words):
                writer = self._writing.get(word)
                if writer is None or not is_active(writer):
                    self._writing[word] = mine
                    asked.append(i)
        claims = np.full(len(words), TAKEN, np.int8)
        try:
            claims[asked] = self._ask(keys[asked], ttl_s)
        except Unavailable:  # no need to end them, while the directory is away
            self._forget(words[i] for i in asked)
            raise
        is_granted = (claims == GRANTED).tolist()
        self._forget(words[i] for i in asked if not is_granted[i])
        return claims

    def keep(self, key: np.ndarray) -> Guard:
        """Keep a granted claim, ``[1, 2]``, until it is settled, or what is returned is dropped."""
        guard = Guard()
        guard.acquire()
        self._writing[words_of(key)[0]] = weakref.ref(guard, self._dropped.append)
        return guard

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
            is_here = self._entries.publish(keys)
            for part in in_parts(keys[~(is_here | is_published)]):
                self._directory.abandon(self._member, part)
        except Unavailable as error:
            logger.warning("claims stay until they run out: %s", error)
        self._forget(words_of(keys))

    def settle_dropped(self) -> None:
        """The same as ``settle_left``, where it has something to do after a put was dropped."""
        if self._dropped:  # seldom
            self._dropped.clear()
            self.settle_left()

    def settle_left(self) -> None:
        """End the claims that were not settled: their puts were dropped, or interrupted."""
        with (guard := Guard()):
            with self._lock:
                left = [word for word, writer in self._writing.items() if not is_active(writer)]
                self._writing.update(dict.fromkeys(left, weakref.ref(guard)))
            if left:
                self.settle(np.frombuffer(b"".join(left), np.uint64).reshape(-1, 2))

    def _ask(self, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        claims = self._ask_directory(keys, ttl_s)
        listed = np.flatnonzero(claims == LISTED)
        if len(listed):
            went = listed[self._entries.withdraw_gone(keys[listed])]
            claims[went] = self._ask_directory(keys[went], ttl_s)
            is_left = claims == LISTED  # by now it is here again, or is being written
            is_here = self._entries.has_keys(keys[is_left])
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
            for word in words:
                self._writing.pop(word, None)


class Guards:
    """Guards that are in use. Thread-safe."""

    def __init__(self) -> None:
        self._guards: set[weakref.ref] = set()

    def new(self) -> Guard:
        """Return one for a ``with`` block."""
        guard = Guard()
        self._guards.add(weakref.ref(guard, self._guards.discard))
        return guard

    def any(self) -> bool:
        """Whether any such block is running."""
        # Unlike tuple() and the like, copy() cannot be interrupted by the collection of a guard.
        return any(map(is_active, self._guards.copy()))


def is_active(guard: "weakref.ref[Guard]") -> bool:
    """Whether the block runs."""
    alive = guard()
    return alive is not None and alive.locked()


class Admission:
    """A gate to a pool, for this node's callers and for requests of others. Thread-safe::

        with admission.enter():
            if admission.is_open:
                ...  # put objects

    To drain the pool, close the gate and wait until those inside are done: then the only new
    objects are those of processes without a node.

    Attributes:
        is_open: whether those who have entered may put objects.
    """

    def __init__(self) -> None:
        self.is_open = True
        self._inside = Guards()

    def set_open(self, is_open: bool) -> None:
        """Open or close it; those inside stay."""
        self.is_open = is_open

    @property
    def is_used(self) -> bool:
        """Whether anyone is inside."""
        return self._inside.any()

    def enter(self) -> Guard:
        """Enter for the duration of a ``with`` block, then look whether it is open."""
        return self._inside.new()
