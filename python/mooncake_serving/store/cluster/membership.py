"""Who takes part in a store: this node's membership, and what it knows of the other members."""

import contextlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.pool import PoolStats

from ..directory import Directory, Member
from ..store import Store
from .directory_entries import DirectoryEntries

logger = logging.getLogger(__name__)

BEATS_A_LOOK = 3  # a look covers all objects of the pool
BEATS_A_COMPARISON = 30  # all objects of the pool against all its entries in the directory
BEATS_A_SWEEP = 10


class Membership:
    """Membership in a directory, from ``join`` until ``close``.

    One thread keeps the node a member, another publishes what its pool has: publishing millions of
    objects may take longer than a membership lasts.

    Args:
        directory: to join.
        entries: of the node's pool, published again whenever the directory has forgotten it.
        describe: returns the node's current entry for the directory.
        ttl_s: after how many seconds without a sign of life it is considered dead.
        meet: is called with every living member whenever they are asked for, and with what was
            reported of that name before.
        on_members: is called with the living members, by name, several times in ``ttl_s``.
        on_beat: is called as often, also while the directory does not answer.
        on_rejoin: is called after the directory has forgotten the member, or was replaced.

    Attributes:
        members: the living members by name, as last reported.
        homes: those whose pools take objects, without this node's: the emptiest first.
        serving: by the name of each pool the living members that serve it; none for this node's.
    """

    def __init__(
        self,
        directory: Directory,
        entries: DirectoryEntries,
        describe: Callable[[], Member],
        ttl_s: float,
        meet: Callable[[Member, Member | None], object],
        on_members: Callable[[dict[str, Member]], object],
        on_beat: Callable[[], object],
        on_rejoin: Callable[[], object],
    ):
        self._directory = directory
        self._entries = entries
        self._describe = describe
        self._ttl_s = ttl_s
        self._meet = meet
        self._on_members = on_members
        self._on_beat = on_beat
        self._on_rejoin = on_rejoin
        self._name = self._pool = ""
        self._is_over = threading.Event()
        self._must_look = threading.Event()
        self._joining = threading.Lock()  # so that none joins who has left
        self.members: dict[str, Member] = {}
        self.serving: dict[str, list[Member]] = {}
        self.homes: tuple[Member, ...] = ()
        self._served: set[str] = set()  # names of all members with pools so far
        self._threads: list[threading.Thread] = []

    def join(self) -> None:
        """Become a member.

        Raises:
            Unavailable: the directory does not answer.
        """
        entry = self._describe()
        self._name, self._pool = entry.name, entry.pool
        self._directory.join(entry, self._ttl_s)
        try:
            for run, name in ((self._renew, "mk-store-member"), (self._look, "mk-store-look")):
                thread = threading.Thread(target=run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
            self._entries.publish_all()
            self.refresh()
        except BaseException:
            self.close()
            raise

    def refresh(self) -> dict[str, Member]:
        """Ask which members live.

        Raises:
            Unavailable: the directory does not answer.
        """
        before = self.members
        self.members = {member.name: member for member in self._directory.members()}
        for name, member in self.members.items():
            self._meet(member, before.get(name))
        serving: dict[str, list[Member]] = {self._pool: []}
        for member in self.members.values():
            if member.pool not in ("", self._pool):
                serving.setdefault(member.pool, []).append(member)
        self.serving = serving
        homes = (
            member
            for member in self.members.values()
            if member.pool not in ("", self._pool) and not member.is_draining
        )
        self.homes = tuple(sorted(homes, key=lambda member: -member.free_bytes))
        self._served.update(name for name, member in self.members.items() if member.pool)
        return self.members

    def has_served(self, name: str) -> bool:
        """Whether a member of that name with a pool was ever reported."""
        return name in self._served

    def rejoin(self) -> None:
        """Join again now, if the directory does not know the member: the threads would notice that
        later. They tell what the pool has.

        Raises:
            Unavailable: the directory does not answer.
        """
        if self._renew_or_join():
            self._must_look.set()

    def announce(self) -> None:
        """Tell the directory of a change now.

        Raises:
            Unavailable: the directory does not answer; it is notified later.
        """
        if self._renew_or_join():
            self._entries.publish_all()
        self.refresh()

    def close(self) -> None:
        """Leave. If the directory does not answer, it forgets the member by itself."""
        self.stop()
        try:
            with self._joining:
                self._directory.leave(self._name)
        except Unavailable as error:
            logger.warning("%s did not leave: %s", self._name, error)

    def stop(self) -> None:
        """End the threads, and let the membership expire. Idempotent."""
        self._is_over.set()
        self._must_look.set()
        for thread in self._threads:
            if thread.ident is not None:  # it was started
                thread.join()

    def _renew(self) -> None:
        own_beats = _Beats(f"{self._name} cannot end what others have not ended in time")
        beats = _Beats(f"{self._name} cannot renew its membership")
        while not self._is_over.wait(self._ttl_s / 3):
            with own_beats.next():
                self._on_beat()
            with beats.next():
                self._renew_once()

    def _renew_once(self) -> None:
        if self._renew_or_join():
            self._must_look.set()
        self._on_members(self.refresh())

    def _renew_or_join(self) -> bool:
        """Renew, or join; return whether it had to join, so its pool must be published."""
        with self._joining:
            if self._is_over.is_set() or self._directory.renew(self._describe(), self._ttl_s):
                return False
            self._entries.is_stale = True  # also if the answer to the next call is lost
            self._directory.join(self._describe(), self._ttl_s)
            self._on_rejoin()
            return True

    def _look(self) -> None:
        beats = _Beats(f"{self._name} cannot tell what its pool has")
        while True:
            self._must_look.wait(self._ttl_s / 3)
            self._must_look.clear()
            if self._is_over.is_set():
                return
            with beats.next() as number:
                self._look_once(number)

    def _look_once(self, number: int) -> None:
        if self._entries.is_stale or number % BEATS_A_COMPARISON == 0:
            self._entries.publish_all()
        elif number % BEATS_A_LOOK == 0:
            self._entries.publish_changes()
        if number % BEATS_A_SWEEP == 0:
            self._directory.sweep()


class _Beats:
    """A thread's repeated action; of consecutive failures one is logged."""

    def __init__(self, what: str):
        self._what = what
        self._number = 0
        self._is_failing = False

    @contextlib.contextmanager
    def next(self) -> Iterator[int]:
        self._number += 1
        try:
            yield self._number
            self._is_failing = False
        except (RuntimeError, OSError, ValueError) as error:  # also of a pool or an engine
            if not self._is_failing:
                logger.warning("%s: %s", self._what, error)
            self._is_failing = True


class PeerBackoff:
    """Nodes that were silent lately. Thread-safe.

    A node that hangs remains a member until its time to live is over. Until then, every request to
    it would take as long as an answer may: so after one, it is asked again only when a while has
    passed, or once something has come from it. One that refuses a connection costs no time, and may
    be back at once: it is not silent. Nor is a later node of the same name.

    Args:
        lasts_s: for how long a node is not asked.

    Attributes:
        silent: by the name of a node its life, and until when it is not asked; usually empty.
    """

    def __init__(self, lasts_s: float):
        self._lasts_s = lasts_s
        self.silent: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()

    def failed(self, member: Member, error: TransferError | Unavailable) -> None:
        """Note that a request to a node failed: if it was not answered in time, it is silent."""
        logger.info("%s is passed over: %s", member.name, error)
        if getattr(error, "timed_out", False):
            with self._lock:
                self.silent[member.name] = member.life, time.monotonic() + self._lasts_s

    def heard(self, name: str) -> None:
        """Note that something came from a node."""
        if self.silent:  # messages are many
            with self._lock:
                self.silent.pop(name, None)

    def among(self, holders: Iterable[Sequence[Member]]) -> set[str]:
        """Names of the members that are not asked now."""
        return {member.name for members in holders for member in members if member in self}

    def __contains__(self, member: Member) -> bool:
        if not self.silent:
            return False
        with self._lock:
            life, until = self.silent.get(member.name, (0, 0.0))
            if until and time.monotonic() >= until:
                del self.silent[member.name]
                until = 0.0
            return until > 0 and life == member.life


class Lives:
    """The last known life of each name, see ``Request``. Thread-safe."""

    def __init__(self) -> None:
        self._lives: dict[str, int] = {}
        self._lock = threading.Lock()

    def meet(self, name: str, life: int) -> bool:
        """Record the life that a name has now; returns whether it was known with another one."""
        with self._lock:
            known = self._lives.get(name)
            self._lives[name] = life
        return known not in (None, life)

    def keep(self, names: Container[str]) -> None:
        """Forget all other names."""
        with self._lock:
            self._lives = {name: life for name, life in self._lives.items() if name in names}


class CachedStats:
    """The current statistics of a store, or the last known ones if it takes long. Thread-safe.

    A process that was stopped during a change holds the pool: then ``stats`` takes 10 s and fails.

    Args:
        store: whose statistics they are.
        wait_s: how long ``get`` waits for the current ones.

    Raises:
        TimeoutError: a stopped process holds the pool.
    """

    def __init__(self, store: Store, wait_s: float):
        self._store = store
        self._wait_s = wait_s
        self._last = store.stats()
        self._executor = ThreadPoolExecutor(1, "mk-store-stats")
        self._asked: Future[PoolStats] | None = None
        self._lock = threading.Lock()

    def get(self) -> PoolStats:
        with self._lock:
            if self._asked is None or self._asked.done():
                try:
                    self._asked = self._executor.submit(self._store.stats)
                except RuntimeError:  # the interpreter exits
                    return self._last
            asked = self._asked
        wait([asked], self._wait_s)
        if asked.done():
            try:
                self._last = asked.result()
            except TimeoutError as error:
                logger.debug("the last statistics of %s are used: %s", self._store.pool.path, error)
        return self._last

    def close(self) -> None:
        """End the thread; it may wait for the pool."""
        self._executor.shutdown()


def preference(member: Member, preferred: Sequence[str]) -> int:
    """Rank of a member among the preferred; the number of these if it is none of them."""
    for place, wish in enumerate(preferred):
        if wish in (member.name, member.host):
            return place
    return len(preferred)


def check_preferred(op: str, preferred: Any) -> None:
    """Refuse a value that is not a sequence of names."""
    if isinstance(preferred, str | bytes) or not (
        isinstance(preferred, Sequence) and all(isinstance(name, str) for name in preferred)
    ):
        raise InvalidArgument(
            f"{op}: preferred must be a sequence of names and hosts, got {preferred!r:.80}"
        )


def boot_id() -> str:
    """Linux's id of this boot of the machine, the same in containers."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def host_name() -> str:
    """Name of the machine, unique even if two machines have the same host name."""
    return f"{socket.gethostname()}-{boot_id()[:8]}"


def pool_name(path: str) -> str:
    """Name of the pool in a file, whatever path leads to it."""
    file = os.stat(path)
    return f"{boot_id()}-{file.st_dev:x}-{file.st_ino:x}"
