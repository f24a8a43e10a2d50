"""A directory in Redis, for nodes of many hosts."""

import json
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from typing import Any

import numpy as np

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.metadata import bounded_socket
from mooncake_kernels.metadata.redis_client import Answer, RedisClient, pack
from mooncake_kernels.metadata.url import DEFAULT_PREFIX, parse_url
from mooncake_kernels.transfer import RedisPublisher

from . import redis_scripts as scripts
from .base import (
    KEY_BYTES,
    KEY_WORD,
    MAX_KEYS,
    MAX_TTL_S,
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
    prefix_of,
)
from .redis_scripts import Script

FORMS = (
    '"redis://host:port/db", "rediss://host:port/db", "unix:///path?db=db" '
    'or "redis+sentinel://host:port,host:port/service?db=db"'
)
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel")
CHUNK = 4096  # per script: the server does nothing else meanwhile, for some milliseconds
MAX_OBJECTS = 1 << 48  # of one pool
INDEX = np.dtype("<u4")
CLAIMS = bytes(Claim)
PUBLISHED = bytes(Published)
GIVEN_UP = bytes((False, True))
CLOSED = "RedisDirectory: the directory must be open, got a closed one"


class RedisDirectory(Directory):
    """A ``Directory`` in Redis 6.2 or later, or in Valkey. It connects on first use.

    Atomic for 4096 keys at a time. The server must not evict: ``maxmemory-policy noeviction``.

    Args:
        url: ``redis://``, ``rediss://``, ``unix://`` or ``redis+sentinel://``, as for a metadata
            server.
        cluster: names the group of pools; groups on one server do not see each other.

    Raises:
        InvalidArgument: the URL is none of these, or the name is not allowed.
        Unavailable: redis-py is not installed.
    """

    def __init__(self, url: str, cluster: str = "mooncake"):
        parsed = parse_url("RedisDirectory", "url", url, FORMS, SCHEMES)
        if parsed.prefix != DEFAULT_PREFIX:
            raise InvalidArgument(
                f"RedisDirectory: url must be {FORMS}, got a prefix; a cluster does what that would"
            )
        if not isinstance(cluster, str) or not re.fullmatch(r"[\w./:-]{1,64}", cluster, re.ASCII):
            raise InvalidArgument(
                "RedisDirectory: cluster must be 1 to 64 letters, digits or any of _./:-, "
                f"got {cluster!r}"
            )
        self._prefix = f"{{{cluster}}}:"
        self._client = RedisClient(parsed)
        self._is_closed = False

    def join(self, member: Member, ttl_s: float) -> None:
        self._run(scripts.JOIN, _entry("join", member, ttl_s), _as_done)

    def renew(self, member: Member, ttl_s: float) -> bool:
        return self._run(scripts.RENEW, _entry("renew", member, ttl_s), _as_done)

    def leave(self, name: str) -> None:
        self._run(scripts.LEAVE, (as_name("leave", "name", name),), _as_done)

    def members(self) -> list[Member]:
        return self._run(scripts.MEMBERS, (), _as_members)

    def claim(self, name: str, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        before = as_name("claim", "name", name), _as_ttl_ms("claim", ttl_s)
        claims = self._run_on_keys("claim", scripts.CLAIM, keys, _as_claims, before)
        if claims is None:
            raise NotAMember(f"claim: the directory knows no living member {name!r}")
        return claims

    def publish(self, pool: str, keys: np.ndarray, *, is_copy: bool = False) -> np.ndarray:
        script = scripts.PUBLISH_COPIES if is_copy else scripts.PUBLISH
        before = (as_name("publish", "pool", pool),)
        return self._run_on_keys("publish", script, keys, _as_published, before)

    def publisher(self, pool: str) -> RedisPublisher | None:
        """None if the connection is encrypted; see ``Directory.publisher``."""
        as_name("publisher", "pool", pool)
        script = scripts.PUBLISH_NEW
        if self._is_closed:
            raise Unavailable(CLOSED)
        commands = pack("SCRIPT", "LOAD", script.source), pack("TIME")
        made = self._client.detach(commands, _as_time_ms)
        if made is None:
            return None
        fd, now_ms = made
        head = pack("EVALSHA", script.sha, 1, self._prefix, pool, num_more=2)
        clock_ms = now_ms - int(time.monotonic() * 1000)
        return RedisPublisher(fd, head, bounded_socket.TIMEOUT_S, clock_ms)

    def withdraw(self, pool: str, keys: np.ndarray) -> None:
        before = (as_name("withdraw", "pool", pool),)
        self._run_on_keys("withdraw", scripts.WITHDRAW, keys, _as_done, before)

    def give_up(self, pool: str, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        before, after = (as_name("give_up", "pool", pool),), (_as_ttl_ms("give_up", ttl_s),)
        return self._run_on_keys("give_up", scripts.GIVE_UP, keys, _as_given_up, before, after)

    def remove(self, keys: np.ndarray, ttl_s: float) -> Holders:
        after = (_as_ttl_ms("remove", ttl_s),)
        return self._run_on_keys("remove", scripts.REMOVE, keys, _as_holders, after=after)

    def abandon(self, name: str, keys: np.ndarray) -> None:
        before = (as_name("abandon", "name", name),)
        self._run_on_keys("abandon", scripts.ABANDON, keys, _as_done, before)

    def holders(self, keys: np.ndarray) -> Holders:
        return self._run_on_keys("holders", scripts.HOLDERS, keys, _as_holders)

    def match_prefix(self, keys: np.ndarray) -> Holders:
        found = self._run_on_keys("match_prefix", scripts.MATCH_PREFIX, keys, _as_holders)
        return prefix_of(found)

    def keys_of(self, pool: str, cursor: int = 0, count: int = 1000) -> tuple[int, np.ndarray]:
        """Return about ``count`` keys, at times a few more; see ``Directory.keys_of``."""
        as_name("keys_of", "pool", pool)
        call = (pool, *as_range("keys_of", cursor, count))
        return self._run(scripts.KEYS_OF, call, _as_page)

    def num_objects(self, pool: str) -> int:
        as_name("num_objects", "pool", pool)
        return self._run(scripts.NUM_OBJECTS, (pool,), _as_count)

    def sweep(self) -> Sequence[str]:
        """Forget 4096 objects per round trip; see ``Directory.sweep``."""
        swept: set[str] = set()
        more = True
        while more:
            more, names = self._run(scripts.SWEEP, (CHUNK,), _as_swept)
            swept.update(names)
        return sorted(swept)

    def close(self) -> None:
        """Disconnect; later calls raise ``Unavailable``. Idempotent."""
        self._is_closed = True  # the client would connect again
        self._client.close()

    def _run(
        self, script: Script, words: tuple[str | int, ...], parse: Callable[[list[Any]], Answer]
    ) -> Answer:
        """Return what a function makes of a script's answer, as a list of one."""
        if self._is_closed:
            raise Unavailable(CLOSED)
        command = pack("EVALSHA", script.sha, 1, self._prefix, *words)
        return self._client.ask([command], parse, script=script.source)

    def _run_on_keys(
        self,
        op: str,
        script: Script,
        keys: np.ndarray,
        parse: Callable[[list[Any], int], Answer],
        before: tuple[str | int, ...] = (),
        after: tuple[str | int, ...] = (),
    ) -> Answer:
        """Run a script on keys, between other arguments, in one round trip.

        Returns:
            What a function makes of the answers and the number of keys: an answer for each chunk.
        """
        is_right = type(keys) is np.ndarray and keys.dtype == KEY_WORD and keys.shape[1:] == (2,)
        if not is_right or len(keys) > MAX_KEYS:
            keys = as_keys(op, keys)
        packed = keys.tobytes()
        if self._is_closed:
            raise Unavailable(CLOSED)
        head = "EVALSHA", script.sha, 1, self._prefix, *before
        size = CHUNK * KEY_BYTES
        commands = []
        for i in range(0, len(packed) or 1, size):
            commands.append(pack(*head, packed[i : i + size], *after))
        num_keys = len(packed) // KEY_BYTES
        return self._client.ask(commands, parse, num_keys, script=script.source)


def _entry(op: str, member: Member, ttl_s: float) -> tuple[str, str, str, int]:
    as_member(op, member)
    ttl_ms = _as_ttl_ms(op, ttl_s)
    return member.name, member.pool, json.dumps(asdict(member), default=int), ttl_ms


def _as_ttl_ms(op: str, ttl_s: float) -> int:
    if type(ttl_s) is not float or not 0 < ttl_s <= MAX_TTL_S:
        ttl_s = as_ttl_s(op, ttl_s)
    return max(1, round(ttl_s * 1000))


# A server's answers are checked: anything unexpected is a ``ValueError``.


def _as_integer(answer: Any, high: int) -> int:
    """An integer from 0 to high."""
    if not isinstance(answer, int) or not 0 <= answer <= high:
        raise ValueError(f"an integer from 0 to {high} was expected")
    return answer


def _as_done(answers: list[Any], num_keys: int = 0) -> bool:
    """Whether the last of some scripts, each of which reports this, has done something."""
    return [_as_integer(answer, 1) for answer in answers][-1] == 1


def _as_count(answers: list[Any]) -> int:
    return _as_integer(answers[0], MAX_OBJECTS)


def _as_time_ms(answers: list[Any]) -> int:
    """The server's clock, of two strings: seconds, and microseconds beyond them."""
    seconds, microseconds = map(int, answers[-1])
    return seconds * 1000 + microseconds // 1000


def _as_members(answers: list[Any]) -> list[Member]:
    """Members by name, from the entries that they wrote."""
    (entries,) = answers
    members = []
    for entry in entries:
        document = json.loads(entry)
        names = {field.name for field in fields(Member)}
        values = {name: value for name, value in document.items() if name in names}
        members.append(as_member("members", Member(**values)))
    return sorted(members, key=lambda member: member.name)


def _as_claims(answers: list[Any], num_keys: int) -> np.ndarray | None:
    """``[n]`` int8 of ``Claim``; None if the member is not known."""
    if None in answers:
        return None
    return _as_bytes(answers, num_keys, CLAIMS).view(np.int8)


def _as_published(answers: list[Any], num_keys: int) -> np.ndarray:
    """``[n]`` int8 of ``Published``."""
    return _as_bytes(answers, num_keys, PUBLISHED).view(np.int8)


def _as_given_up(answers: list[Any], num_keys: int) -> np.ndarray:
    """``[n]`` bool."""
    return _as_bytes(answers, num_keys, GIVEN_UP).view(bool)


def _as_bytes(answers: list[Any], num_keys: int, allowed: bytes) -> np.ndarray:
    """``[n]`` uint8: one byte per key."""
    for answer in answers:
        num_here = min(num_keys, CHUNK)
        if len(answer) != num_here:
            raise ValueError(f"{num_here} bytes were expected, got {len(answer)}")
        num_keys -= num_here
    packed = b"".join(answers)
    if packed.strip(allowed):
        raise ValueError(f"bytes of {allowed!r} were expected")
    return np.frombuffer(bytearray(packed), np.uint8)


def _as_holders(answers: list[Any], num_keys: int) -> Holders:
    """For each key the names of pools, by index into lists of names; none of the last keys."""
    found: Holders = []
    for lists, indices in answers:
        names: Holders = [()]
        for pools in json.loads(lists.decode()):
            if not isinstance(pools, list) or not {str}.issuperset(map(type, pools)):
                raise ValueError("names of pools were expected")
            names.append(tuple(sorted(pools)))
        known = np.frombuffer(indices, INDEX).tolist()
        num_here = min(num_keys, CHUNK)
        if len(known) > num_here:
            raise ValueError(f"holders of {num_here} keys were expected, got {len(known)}")
        found.extend(map(names.__getitem__, known))
        found.extend([()] * (num_here - len(known)))
        num_keys -= num_here
    return found


def _as_page(answers: list[Any]) -> tuple[int, np.ndarray]:
    """The next cursor, and ``[k, 2]`` keys."""
    ((cursor, keys),) = answers
    return _as_integer(int(cursor), (1 << 64) - 1), np.frombuffer(keys, "<u8").reshape(-1, 2).copy()


def _as_swept(answers: list[Any]) -> tuple[bool, list[str]]:
    """Whether there is more to do, and the names of pools that are done."""
    ((more, *names),) = answers
    return _as_integer(more, 1) == 1, [name.decode() for name in names]
