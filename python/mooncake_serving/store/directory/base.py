"""The interface of a directory, which knows which pools have which objects.

A directory is a hint and never the truth: pools know what they have. It may lag behind, or lose its
latest updates, and still nothing wrong is ever read: a pool that is asked for an object it no
longer has says so, and the reader asks the next. What the directory does decide is which of several
writers of one key wins.
"""

import enum
import math
import numbers
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import numpy as np

from mooncake_kernels import pool
from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.transfer import RedisPublisher

Self = TypeVar("Self", bound="Directory")
Holders = list[tuple[str, ...]]  # for each key the names, sorted, of living pools that have it
MAX_KEYS = 1 << 16  # in one call
MAX_NAME_BYTES = 255
MAX_TTL_S = 1e9
MAX_COUNT = 1 << 16  # that keys_of returns at once
KEY_BYTES = 16
KEY_WORD = np.dtype("<u8")


@dataclass(frozen=True)
class Member:
    """A process that takes part.

    Attributes:
        name: of its transfer engine: its identity, and the address by which others reach it.
        host: names the machine, so that copies are spread over several.
        pool: names the pool that it serves, "" if it has none. Several processes may serve one.
        capacity_bytes: of that pool.
        free_bytes: of that pool, as last reported.
        is_draining: whether it accepts no new objects.
        publishes: whether its engine lists what others put into the pool, if they ask for that.
        life: random, new for every node: a name may have belonged to another process before.
    """

    name: str
    host: str
    pool: str = ""
    capacity_bytes: int = 0
    free_bytes: int = 0
    is_draining: bool = False
    publishes: bool = False
    life: int = 0

    def with_free(self, free_bytes: int) -> "Member":
        return replace(self, free_bytes=free_bytes)


class Claim(enum.IntEnum):
    """Result of asking to write an object."""

    GRANTED = 0  # exclusive, until it is published, withdrawn, or the claim runs out
    EXISTS = 1  # a living pool has it
    TAKEN = 2  # a living member is writing it
    LISTED = 3  # the pool of the member itself has it, and no other living one


class Published(enum.IntEnum):
    """Result of publishing an object of a pool."""

    LISTED = 0
    REMOVED = 1  # not listed: it is a copy of a removed object that no one has put since
    NOT_SERVED = 2  # not listed: no living member serves the pool; when one joins, it publishes all


class NotAMember(Unavailable):
    """The directory does not know a member (any more): ``Directory.renew`` tells it what to do."""


def prefix_of(holders: Holders) -> Holders:
    """Cut after the first keys, up to one that no pool has."""
    return holders[: holders.index(())] if () in holders else holders


class Directory(Protocol):
    """Members, and which pools have which objects. Thread-safe.

    For one group of pools (a ``cluster`` name).

    Keys are ``[n, 2]`` uint64, as ``ObjectPool`` takes them. Every call is one round trip however
    many keys it names, up to ``MAX_KEYS`` of them, and atomic unless it says otherwise.

    A pool lives as long as one of its members does; members must ``renew`` within their time to
    live. What is known of a dead pool is forgotten: at once in all answers, later in memory.

    Raises (all): ``Unavailable`` if the server cannot be reached, or its answer makes no sense.
    """

    def join(self, member: Member, ttl_s: float) -> None:
        """Add a member, or replace the entry of that name.

        Its claims stay valid if it was a member and serves the same pool; otherwise they are void.
        """

    def renew(self, member: Member, ttl_s: float) -> bool:
        """Report that a member lives, and its free bytes. False: the member is not known (any
        more), because its time to live is over, the server has forgotten it, or it serves another
        pool than this says: ``join`` again, and ``publish`` everything it has.

        Also False if the server is not the one it joined: it was restarted, or replaced one that
        failed. Such a server may lack the latest updates, though it knows the member.
        """

    def leave(self, name: str) -> None:
        """Remove a member. Its claims are void. If it was the last to serve its pool, what the pool
        has is forgotten.
        """

    def members(self) -> list[Member]:
        """Return all living members, by name."""

    def claim(self, name: str, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        """Request the right to write objects, for a member: ``[n]`` int8 of ``Claim``.

        A granted claim is void after its time, and when its member is gone. The owner of a claim
        may claim again.

        Raises:
            NotAMember: the member is not known.
        """

    def publish(self, pool: str, keys: np.ndarray, *, is_copy: bool = False) -> np.ndarray:
        """Record that a pool has objects now, which ends claims to them: ``[n]`` of ``Published``.
        Idempotent.

        The objects were put, unless ``is_copy``: then they came from other pools, or were there
        before, and objects removed meanwhile must not come back.
        """

    def publisher(self, pool: str) -> RedisPublisher | None:
        """Return what a pool's engine publishes with by itself: objects that others put there, if
        no other living pool has them, and no living member claims them. The caller owns it.

        Returns:
            None: this directory, or the way to it, has no such thing.
        """

    def withdraw(self, pool: str, keys: np.ndarray) -> None:
        """Record that a pool does not have objects (any more). Idempotent."""

    def give_up(self, pool: str, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        """Withdraw those objects that another living pool has: ``[n]`` bool. Idempotent.

        So of several pools that give up an object at once, one remains. The pool still has them:
        for ``ttl_s``, or until it withdraws them, ``remove`` names it nevertheless.
        """

    def remove(self, keys: np.ndarray, ttl_s: float) -> Holders:
        """Record that no pool shall have objects any more, and return which living pools may have
        them: those listed, those giving them up, and those of an earlier removal whose time is not
        over.

        For that time a copy of such an object is ``REMOVED``, until the object is put again.
        """

    def abandon(self, name: str, keys: np.ndarray) -> None:
        """End a member's claims without writing the objects. Idempotent."""

    def holders(self, keys: np.ndarray) -> Holders:
        """Return which living pools have which objects."""

    def match_prefix(self, keys: np.ndarray) -> Holders:
        """Return which living pools have the first keys, up to the first key that none has."""

    def keys_of(self, pool: str, cursor: int = 0, count: int = 1000) -> tuple[int, np.ndarray]:
        """Page through the objects of a pool: the next cursor, 0 at the end, and ``[k, 2]``.

        Not atomic: objects that come or go meanwhile may be missing, or named twice.
        """

    def num_objects(self, pool: str) -> int:
        """Return how many objects a pool has, according to the directory."""

    def sweep(self) -> Sequence[str]:
        """Free the memory of dead pools' entries; returns the pools' names. Any member calls it
        from time to time; concurrent calls do no harm.
        """

    def close(self) -> None:
        """Disconnect. Idempotent."""

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def as_keys(op: str, keys: Any) -> np.ndarray:
    """Check keys: ``[n, 2]`` little-endian uint64, packed."""
    if type(keys) is not np.ndarray or keys.dtype != KEY_WORD or keys.shape[1:] != (2,):
        if not isinstance(keys, np.ndarray | Sequence) or isinstance(keys, str | bytes):
            raise InvalidArgument(f"{op}: keys must be [n, 2] integers, got {keys!r}")
        keys = pool.as_keys(op, keys)
    if len(keys) > MAX_KEYS:
        raise InvalidArgument(f"{op}: keys must be at most {MAX_KEYS}, got {len(keys)}")
    return np.ascontiguousarray(keys, KEY_WORD)


def as_name(op: str, argument: str, value: Any) -> str:
    """Check a string that is not empty, and no longer than names are."""
    if not is_word(value) or value == "":
        raise InvalidArgument(
            f"{op}: {argument} must be a str of 1 to {MAX_NAME_BYTES} bytes, got {value!r}"
        )
    return value


def as_ttl_s(op: str, value: Any) -> float:
    seconds = float(value) if isinstance(value, numbers.Real) else math.nan
    if not 0 < seconds <= MAX_TTL_S:
        raise InvalidArgument(
            f"{op}: ttl_s must be a number of seconds above 0, up to {MAX_TTL_S:g}, got {value!r}"
        )
    return seconds


def as_member(op: str, value: Any) -> Member:
    if not isinstance(value, Member):
        raise InvalidArgument(f"{op}: member must be a Member, got {value!r}")
    as_name(op, "member.name", value.name)
    for field in ("host", "pool"):
        if not is_word(getattr(value, field)):
            raise InvalidArgument(
                f"{op}: member.{field} must be a str of at most {MAX_NAME_BYTES} bytes, "
                f"got {getattr(value, field)!r}"
            )
    for field in ("capacity_bytes", "free_bytes", "life"):
        if not is_size(getattr(value, field)):
            raise InvalidArgument(
                f"{op}: member.{field} must be an integer from 0 to 2**63 - 1, "
                f"got {getattr(value, field)!r}"
            )
    for field in ("is_draining", "publishes"):
        if not isinstance(getattr(value, field), bool):
            raise InvalidArgument(
                f"{op}: member.{field} must be a bool, got {getattr(value, field)!r}"
            )
    return value


def as_range(op: str, cursor: Any, count: Any) -> tuple[int, int]:
    """Check where to continue, and about how many to return."""
    if not is_size(cursor, 64):
        raise InvalidArgument(
            f"{op}: cursor must be 0 or what was returned last, an integer, got {cursor!r}"
        )
    if not is_size(count) or not 1 <= count <= MAX_COUNT:
        raise InvalidArgument(
            f"{op}: count must be an integer from 1 to {MAX_COUNT}, got {count!r}"
        )
    return int(cursor), int(count)


def is_word(value: Any) -> bool:
    """Whether it is a string that UTF-8 can encode, and not too long."""
    try:
        return isinstance(value, str) and len(value.encode()) <= MAX_NAME_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def is_size(value: Any, num_bits: int = 63) -> bool:
    is_integer = isinstance(value, int | np.integer) and not isinstance(value, bool)
    return is_integer and 0 <= value < 1 << num_bits
