"""A directory in this process."""

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mooncake_kernels.transfer import RedisPublisher

from ..checks import check_callable
from .base import (
    KEY_BYTES,
    Claim,
    Directory,
    Holders,
    Member,
    NotAMember,
    Published,
    as_keys,
    as_member,
    as_name,
    as_range,
    as_ttl_s,
)


class KeySet:
    """Keys in a list, and the position of each: the time of a call does not depend on their number.

    A scan goes down from the end. The last key takes the place of a removed one, so a key can only
    move to a place that was not scanned yet: it may be returned twice, but is never missed.
    """

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._index: dict[bytes, int] = {}  # decides which keys there are
        self._is_changing = False

    def add(self, key: bytes) -> None:
        if key not in self._index:
            self._begin_change()
            self._index[key] = len(self._keys)
            self._keys.append(key)
            self._is_changing = False

    def discard(self, key: bytes) -> None:
        if key in self._index:
            self._begin_change()
            index = self._index.pop(key)
            last = self._keys.pop()
            if last != key:
                self._keys[index] = last
                self._index[last] = index
            self._is_changing = False

    def scan(self, cursor: int, count: int) -> tuple[int, list[bytes]]:
        """Return the next cursor and up to count keys; 0 is both the first cursor and the end."""
        if self._is_changing:
            self._begin_change()
            self._is_changing = False
        end = min(cursor, len(self._keys)) if cursor else len(self._keys)
        start = max(0, end - count)
        return start, self._keys[start:end]

    def _begin_change(self) -> None:
        """Note that the list changes; complete a change during which Ctrl-C came."""
        if self._is_changing:
            there = dict.fromkeys((*self._keys, *self._index))
            self._keys = [key for key in there if key in self._index]
            self._index = {key: i for i, key in enumerate(self._keys)}
        self._is_changing = True

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


LISTED, REMOVED, NOT_SERVED = map(int, Published)  # looking up an enum's members is slow


@dataclass(eq=False)
class _Pool:
    """A pool from its first member to its last; a new object when it comes back."""

    name: str
    keys: KeySet = field(default_factory=KeySet)


@dataclass(eq=False)
class _Seat:
    """A member for as long as it lives; a new object when it comes back."""

    member: Member
    pool: _Pool | None
    until: float


class EmbeddedDirectory(Directory):
    """A ``Directory`` for nodes of one process: tests, simulations, a single host.

    All nodes share the object; ``close`` does nothing, since others may still use it.

    Args:
        clock: seconds that have passed, by which members and claims expire.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        check_callable("EmbeddedDirectory", "clock", clock)
        self._clock = clock
        self._lock = threading.Lock()
        self._seats: dict[str, _Seat] = {}
        self._pools: list[_Pool] = []  # including dead ones, until they are swept
        self._holders: dict[bytes, tuple[_Pool, ...]] = {}  # by their names
        self._claims: dict[bytes, tuple[_Seat, float]] = {}
        self._removed: dict[bytes, tuple[set[_Pool], float]] = {}  # which pools had it; until when
        self._leaving: dict[bytes, tuple[set[_Pool], float]] = {}  # which give it up; until when

    def join(self, member: Member, ttl_s: float) -> None:
        as_member("join", member)
        ttl_s = as_ttl_s("join", ttl_s)
        with self._lock:
            now = self._clock()
            seat = self._seats.get(member.name)
            if seat is not None and _sits(seat, member, now):
                seat.member, seat.until = member, now + ttl_s
                return
            self._end(member.name)
            pool = self._living_pools(now).get(member.pool)
            if pool is None and member.pool:
                pool = _Pool(member.pool)
                self._pools.append(pool)
            self._seats[member.name] = _Seat(member, pool, now + ttl_s)

    def renew(self, member: Member, ttl_s: float) -> bool:
        as_member("renew", member)
        ttl_s = as_ttl_s("renew", ttl_s)
        with self._lock:
            now = self._clock()
            seat = self._seats.get(member.name)
            if seat is None or not _sits(seat, member, now):
                return False
            seat.member, seat.until = member, now + ttl_s
            return True

    def leave(self, name: str) -> None:
        as_name("leave", "name", name)
        with self._lock:
            self._end(name)

    def members(self) -> list[Member]:
        with self._lock:
            now = self._clock()
            living = [seat.member for seat in self._seats.values() if seat.until > now]
        return sorted(living, key=lambda member: member.name)

    def claim(self, name: str, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        as_name("claim", "name", name)
        key_bytes = _as_bytes("claim", keys)
        ttl_s = as_ttl_s("claim", ttl_s)
        with self._lock:
            now = self._clock()
            seat = self._seats.get(name)
            if seat is None or seat.until <= now:
                raise NotAMember(f"claim: the directory knows no living member {name!r}")
            living = set(self._living_pools(now).values())
            answers = [self._claim(seat, key, now, ttl_s, living) for key in key_bytes]
        return np.array(answers, np.int8)

    def publish(self, pool: str, keys: np.ndarray, *, is_copy: bool = False) -> np.ndarray:
        as_name("publish", "pool", pool)
        key_bytes = _as_bytes("publish", keys)
        with self._lock:
            now = self._clock()
            living = self._living_pools(now).get(pool)
            if living is None:
                return np.full(len(key_bytes), NOT_SERVED, np.int8)
            answers = [self._publish(living, key, now, is_copy=is_copy) for key in key_bytes]
        return np.array(answers, np.int8)

    def publisher(self, pool: str) -> RedisPublisher | None:
        as_name("publisher", "pool", pool)
        return None

    def withdraw(self, pool: str, keys: np.ndarray) -> None:
        as_name("withdraw", "pool", pool)
        key_bytes = _as_bytes("withdraw", keys)
        with self._lock:
            living = self._living_pools(self._clock()).get(pool)
            if living is None:
                return
            for key in key_bytes:
                self._forget(living, key)  # first: what is still listed is withdrawn again
                living.keys.discard(key)
                if key in self._leaving:
                    self._leaving[key][0].discard(living)

    def give_up(self, pool: str, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        as_name("give_up", "pool", pool)
        key_bytes = _as_bytes("give_up", keys)
        ttl_s = as_ttl_s("give_up", ttl_s)
        with self._lock:
            now = self._clock()
            living = self._living_pools(now)
            giving = living.pop(pool, None)
            others = set(living.values())
            has_other = [not others.isdisjoint(self._holders.get(key, ())) for key in key_bytes]
            if giving is not None:
                for key, is_going in zip(key_bytes, has_other, strict=True):
                    if is_going and giving in self._holders[key]:
                        giving.keys.discard(key)
                        self._forget(giving, key)
                        self._leaving[key] = self._leaving_from(key, now) | {giving}, now + ttl_s
        return np.array(has_other, bool)

    def remove(self, keys: np.ndarray, ttl_s: float) -> Holders:
        key_bytes = _as_bytes("remove", keys)
        ttl_s = as_ttl_s("remove", ttl_s)
        found: Holders = []
        with self._lock:
            now = self._clock()
            living = set(self._living_pools(now).values())
            for key in key_bytes:
                before, until = self._removed.get(key, (set(), now))
                had = living.intersection(self._holders.get(key, ()))
                for pool in had:
                    pool.keys.discard(key)
                    self._forget(pool, key)
                if until > now:
                    had |= before & living
                had |= self._leaving_from(key, now) & living
                self._leaving.pop(key, None)
                self._removed[key] = had, now + ttl_s
                found.append(tuple(sorted(pool.name for pool in had)))
        return found

    def abandon(self, name: str, keys: np.ndarray) -> None:
        as_name("abandon", "name", name)
        key_bytes = _as_bytes("abandon", keys)
        with self._lock:
            seat = self._seats.get(name)
            for key in key_bytes:
                if key in self._claims and self._claims[key][0] is seat:
                    del self._claims[key]

    def holders(self, keys: np.ndarray) -> Holders:
        return self._look_up(_as_bytes("holders", keys), is_prefix=False)

    def match_prefix(self, keys: np.ndarray) -> Holders:
        return self._look_up(_as_bytes("match_prefix", keys), is_prefix=True)

    def keys_of(self, pool: str, cursor: int = 0, count: int = 1000) -> tuple[int, np.ndarray]:
        as_name("keys_of", "pool", pool)
        cursor, count = as_range("keys_of", cursor, count)
        with self._lock:
            living = self._living_pools(self._clock()).get(pool)
            cursor, keys = living.keys.scan(cursor, count) if living else (0, [])
        return cursor, np.array(keys, f"V{KEY_BYTES}").view("<u8").reshape(-1, 2)

    def num_objects(self, pool: str) -> int:
        as_name("num_objects", "pool", pool)
        with self._lock:
            living = self._living_pools(self._clock()).get(pool)
            return len(living.keys) if living else 0

    def sweep(self) -> Sequence[str]:
        with self._lock:
            now = self._clock()
            living = set(self._living_pools(now).values())
            dead = [pool for pool in self._pools if pool not in living]
            for pool in dead:
                for key in pool.keys:
                    self._forget(pool, key)
            self._pools = [pool for pool in self._pools if pool in living]
            self._seats = {name: seat for name, seat in self._seats.items() if seat.until > now}
            self._claims = {
                key: (seat, until)
                for key, (seat, until) in self._claims.items()
                if until > now and seat.until > now
            }
            self._removed = {key: last for key, last in self._removed.items() if last[1] > now}
            self._leaving = {key: last for key, last in self._leaving.items() if last[1] > now}
        return sorted({pool.name for pool in dead})

    def close(self) -> None:
        """Do nothing: the other nodes keep their data."""

    def _look_up(self, keys: list[bytes], *, is_prefix: bool) -> Holders:
        with self._lock:
            living = set(self._living_pools(self._clock()).values())
            return self._find(keys, living, is_prefix=is_prefix)

    def _find(self, keys: list[bytes], living: set[_Pool], *, is_prefix: bool) -> Holders:
        found: Holders = []
        names_of: dict[tuple[_Pool, ...], tuple[str, ...]] = {(): ()}  # few sets for many keys
        for key in keys:
            pools = self._holders.get(key, ())
            names = names_of.get(pools)
            if names is None:
                names = names_of[pools] = tuple(pool.name for pool in pools if pool in living)
            if is_prefix and not names:
                break
            found.append(names)
        return found

    def _living_pools(self, now: float) -> dict[str, _Pool]:
        seats = self._seats.values()
        return {seat.pool.name: seat.pool for seat in seats if seat.pool and seat.until > now}

    def _end(self, name: str) -> None:
        seat = self._seats.pop(name, None)
        if seat is not None:
            seat.until = -math.inf  # its claims still name it

    def _claim(
        self, seat: _Seat, key: bytes, now: float, ttl_s: float, living: set[_Pool]
    ) -> Claim:
        if held := living.intersection(self._holders.get(key, ())):
            return Claim.LISTED if held == {seat.pool} else Claim.EXISTS
        claimant, until = self._claims.get(key, (seat, now))
        if claimant is not seat and until > now and claimant.until > now:
            return Claim.TAKEN
        self._claims[key] = (seat, now + ttl_s)
        return Claim.GRANTED

    def _publish(self, pool: _Pool, key: bytes, now: float, *, is_copy: bool) -> int:
        if is_copy and self._removed.get(key, (None, now))[1] > now:
            return REMOVED
        self._removed.pop(key, None)
        self._claims.pop(key, None)
        holders = self._holders.get(key, ())
        if pool not in holders:
            self._holders[key] = tuple(sorted((*holders, pool), key=lambda holder: holder.name))
        pool.keys.add(key)
        return LISTED

    def _leaving_from(self, key: bytes, now: float) -> set[_Pool]:
        pools, until = self._leaving.get(key, (set(), now))
        return pools if until > now else set()

    def _forget(self, pool: _Pool, key: bytes) -> None:
        holders = tuple(holder for holder in self._holders.get(key, ()) if holder is not pool)
        if holders:
            self._holders[key] = holders
        else:
            self._holders.pop(key, None)


def _as_bytes(op: str, keys: np.ndarray) -> list[bytes]:
    return as_keys(op, keys).view(f"V{KEY_BYTES}").ravel().tolist()


def _sits(seat: _Seat, member: Member, now: float) -> bool:
    """Whether the member is there, and serves the pool that it claims to serve."""
    return seat.until > now and seat.member.pool == member.pool
