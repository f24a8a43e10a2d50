"""What a directory must be able to do, and what it tells: which pools have which objects.

A directory is a hint and never the truth: pools know what they have. So it may lag behind, or lose
what it was told last, and nothing wrong is ever read: who asks a pool for an object that went is
told so, and asks the next. What it does decide is which of several writers of one key wins.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import numpy as np

Self = TypeVar("Self", bound="Directory")


@dataclass(frozen=True)
class Member:
    """A process that takes part.

    Attributes:
        name: of its transfer engine: how the others reach it, and what it is called.
        host: names the machine, so that copies are spread over several.
        pool: names the pool that it serves, "" if it has none. Several processes may serve one.
        capacity_bytes: of that pool.
        free_bytes: of that pool, when it was last heard of.
        is_draining: it takes no new objects.
    """

    name: str
    host: str
    pool: str = ""
    capacity_bytes: int = 0
    free_bytes: int = 0
    is_draining: bool = False

    def with_free(self, free_bytes: int) -> "Member":
        return replace(self, free_bytes=free_bytes)


class Claim(enum.IntEnum):
    """What came of asking to write an object."""

    GRANTED = 0  # nobody else may, until it is published, withdrawn, or the claim runs out
    EXISTS = 1  # a living pool has it
    TAKEN = 2  # a living member writes it just now


class Published(enum.IntEnum):
    """What came of saying that a pool has an object."""

    LISTED = 0
    REMOVED = 1  # nothing: it is a copy of what was removed, and nobody has put it since
    NOT_SERVED = 2  # nothing: no living member serves the pool; when one joins, all is published


Holders = list[tuple[str, ...]]  # for each key the names, sorted, of living pools that have it


def prefix_of(holders: Holders) -> Holders:
    """Those of the first keys, up to one that no pool has."""
    return holders[: holders.index(())] if () in holders else holders


class Directory(Protocol):
    """Who is there, and who has what. Thread-safe; for one group of pools (a ``cluster`` name).

    Keys are ``[n, 2]`` uint64, as ``ObjectPool`` takes them. Every call is one round trip however
    many keys it names, up to ``MAX_KEYS`` of them, and atomic unless it says otherwise.

    A pool lives as long as one of its members does, who must ``renew`` within their time to live.
    What is known of a pool that died is forgotten: at once by what is asked, later in memory.

    Raises (all): ``Unavailable`` if the server cannot be reached, or answers nonsense.
    """

    def join(self, member: Member, ttl_s: float) -> None:
        """Enter a member, or put another entry in the place of the one of its name.

        Its claims go on if it was there and serves the same pool; else they are void.
        """

    def renew(self, member: Member, ttl_s: float) -> bool:
        """Say that it lives, and how much is free. False: it is not known (any more), because its
        time was over, or the server has forgotten, or serves another pool than this says: ``join``
        again, and ``publish`` all it has.

        Also False when the server is another one than it joined: one that was restarted, or took
        the place of one that failed. It may not have what was said last, though it knows the
        member.
        """

    def leave(self, name: str) -> None:
        """Take a member out. Its claims are void. What its pool has is forgotten if it was the last
        to serve it.
        """

    def members(self) -> list[Member]:
        """All who live, by name."""

    def claim(self, name: str, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        """Ask, for a member, to write objects: ``[n]`` int8 of ``Claim``.

        A claim that was granted is void after its time, and when its member is gone. Who has a
        claim may claim again.

        Raises:
            Unavailable: also if the member is not known; ``renew`` tells it what to do.
        """

    def publish(self, pool: str, keys: np.ndarray, *, is_copy: bool = False) -> np.ndarray:
        """Say that a pool has objects now, which ends claims to them: ``[n]`` of ``Published``.
        Idempotent.

        They were put, unless ``is_copy``: then they came from other pools, or were there before,
        and what was removed meanwhile is not to come back.
        """

    def withdraw(self, pool: str, keys: np.ndarray) -> None:
        """Say that a pool does not have objects (any more). Idempotent."""

    def remove(self, keys: np.ndarray, ttl_s: float) -> Holders:
        """Say that no pool shall have objects any more, and which living ones may have them: those
        that were said to, and those of an earlier removal whose time is not over.

        For that time a copy of one is ``REMOVED``, until somebody puts it again.
        """

    def abandon(self, name: str, keys: np.ndarray) -> None:
        """End a member's claims without an object. Idempotent."""

    def holders(self, keys: np.ndarray) -> Holders:
        """Say which living pools have which objects."""

    def match_prefix(self, keys: np.ndarray) -> Holders:
        """Say which living pools have the first keys, up to one that none has, which ends it."""

    def keys_of(self, pool: str, cursor: int = 0, count: int = 1000) -> tuple[int, np.ndarray]:
        """Go through what a pool is said to have: the next cursor, 0 at the end, and ``[k, 2]``.

        Not atomic: what comes or goes meanwhile may be missing, or named twice.
        """

    def num_objects(self, pool: str) -> int:
        """How many objects a pool is said to have."""

    def sweep(self) -> Sequence[str]:
        """Forget, in memory, what pools had that died; returns their names. Any member calls it
        from time to time; many at once do no harm.
        """

    def close(self) -> None:
        """Disconnect. Idempotent."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


MAX_KEYS = 1 << 16  # of one call
