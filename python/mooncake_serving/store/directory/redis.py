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
from mooncake_kernels.metadata.base import milliseconds
from mooncake_kernels.metadata.redis_client import Answer, RedisClient
from mooncake_kernels.metadata.redis_connections import pack_words
from mooncake_kernels.metadata.url import DEFAULT_PREFIX, parse_url
from mooncake_kernels.transfer import RedisPublisher

from . import redis_scripts as scripts
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
    prefix_of,
)
from .redis_scripts import Script, command_head, run_script

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
        self._run(scripts.JOIN, [_entry("join", member, ttl_s)], _as_done)

    def renew(self, member: Member, ttl_s: float) -> bool:
        return self._run(scripts.RENEW, [_entry("renew", member, ttl_s)], _as_done)

    def leave(self, name: str) -> None:
        self._run(scripts.LEAVE, [(as_name("leave", "name", name),)], _as_done)

    def members(self) -> list[Member]:
        return self._run(scripts.MEMBERS, [()], _as_members)

    def claim(self, name: str, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        as_name("claim", "name", name)
        chunks = _chunks("claim", keys)
        ttl_ms = milliseconds(as_ttl_s("claim", ttl_s))
        claims = self._run(
            scripts.CLAIM,
            [(name, ttl_ms, chunk) for chunk in chunks],
            lambda replies: _as_claims(replies, chunks),
        )
        if claims is None:
            raise NotAMember(f"claim: the directory knows no living member {name!r}")
        return claims

    def publish(self, pool: str, keys: np.ndarray, *, is_copy: bool = False) -> np.ndarray:
        as_name("publish", "pool", pool)
        chunks = _chunks("publish", keys)
        return self._run(
            scripts.PUBLISH_COPIES if is_copy else scripts.PUBLISH,
            [(pool, chunk) for chunk in chunks],
            lambda replies: _as_published(replies, chunks),
        )

    def publisher(self, pool: str) -> RedisPublisher | None:
        """None if the connection is encrypted; see ``Directory.publisher``."""
        as_name("publisher", "pool", pool)
        script = scripts.PUBLISH_NEW
        commands = ("SCRIPT", "LOAD", script.source), ("TIME",)
        self._check_open()
        made = self._client.detach(lambda replies: _as_time_ms(replies[1]), *commands)
        if made is None:
            return None
        fd, now_ms = made
        head = command_head(script, self._prefix, 3) + pack_words((pool,))
        clock_ms = now_ms - int(time.monotonic() * 1000)
        return RedisPublisher(fd, head, bounded_socket.TIMEOUT_S, clock_ms)

    def withdraw(self, pool: str, keys: np.ndarray) -> None:
        self._say("withdraw", "pool", pool, keys, scripts.WITHDRAW)

    def give_up(self, pool: str, keys: np.ndarray, ttl_s: float) -> np.ndarray:
        as_name("give_up", "pool", pool)
        chunks = _chunks("give_up", keys)
        ttl_ms = milliseconds(as_ttl_s("give_up", ttl_s))
        return self._run(
            scripts.GIVE_UP,
            [(pool, chunk, ttl_ms) for chunk in chunks],
            lambda replies: _as_given_up(replies, chunks),
        )

    def remove(self, keys: np.ndarray, ttl_s: float) -> Holders:
        ttl_ms = milliseconds(as_ttl_s("remove", ttl_s))
        return self._where("remove", keys, scripts.REMOVE, ttl_ms)

    def abandon(self, name: str, keys: np.ndarray) -> None:
        self._say("abandon", "name", name, keys, scripts.ABANDON)

    def holders(self, keys: np.ndarray) -> Holders:
        return self._where("holders", keys, scripts.HOLDERS)

    def match_prefix(self, keys: np.ndarray) -> Holders:
        return prefix_of(self._where("match_prefix", keys, scripts.MATCH_PREFIX))

    def keys_of(self, pool: str, cursor: int = 0, count: int = 1000) -> tuple[int, np.ndarray]:
        """Return about ``count`` keys, at times a few more; see ``Directory.keys_of``."""
        as_name("keys_of", "pool", pool)
        call = (pool, *as_range("keys_of", cursor, count))
        return self._run(scripts.KEYS_OF, [call], _as_page)

    def num_objects(self, pool: str) -> int:
        as_name("num_objects", "pool", pool)
        return self._run(
            scripts.NUM_OBJECTS,
            [(pool,)],
            lambda replies: _as_integer(replies[0], MAX_OBJECTS),
        )

    def sweep(self) -> Sequence[str]:
        """Forget 4096 objects per round trip; see ``Directory.sweep``."""
        swept: set[str] = set()
        more = True
        while more:
            more, names = self._run(scripts.SWEEP, [(CHUNK,)], _as_swept)
            swept.update(names)
        return sorted(swept)

    def close(self) -> None:
        """Disconnect; later calls raise ``Unavailable``. Idempotent."""
        self._is_closed = True
        self._client.close()

    def _check_open(self) -> None:
        if self._is_closed:  # redis-py would connect again
            raise Unavailable("RedisDirectory: the directory must be open, got a closed one")

    def _say(self, op: str, argument: str, who: str, keys: np.ndarray, script: Script) -> None:
        as_name(op, argument, who)
        self._run(script, [(who, chunk) for chunk in _chunks(op, keys)], _as_done)

    def _where(self, op: str, keys: np.ndarray, script: Script, *arguments: Any) -> Holders:
        chunks = _chunks(op, keys)
        calls = [(chunk, *arguments) for chunk in chunks]
        return self._run(script, calls, lambda replies: _as_holders(replies, chunks))

    def _run(
        self, script: Script, calls: list[tuple], parse: Callable[[list[Any]], Answer]
    ) -> Answer:
        """Run a script once for each call's arguments, in one round trip."""
        self._check_open()
        return self._client.ask(lambda run: parse(run_script(run, script, self._prefix, calls)))


def _entry(op: str, member: Member, ttl_s: float) -> tuple[str, str, str, int]:
    as_member(op, member)
    ttl_ms = milliseconds(as_ttl_s(op, ttl_s))
    return member.name, member.pool, json.dumps(asdict(member), default=int), ttl_ms


def _chunks(op: str, keys: np.ndarray) -> list[bytes]:
    packed = as_keys(op, keys).tobytes()
    size = CHUNK * KEY_BYTES
    return [packed[i : i + size] for i in range(0, max(1, len(packed)), size)]


# A server's answers are checked: anything unexpected is a ``ValueError``.


def _as_integer(answer: Any, high: int) -> int:
    """An integer from 0 to high."""
    if not isinstance(answer, int) or not 0 <= answer <= high:
        raise ValueError(f"an integer from 0 to {high} was expected")
    return answer


def _as_done(answers: list[Any]) -> bool:
    """Whether the last of some scripts, each of which reports this, has done something."""
    return [_as_integer(answer, 1) for answer in answers][-1] == 1


def _as_time_ms(answer: Any) -> int:
    """The server's clock, of two strings: seconds, and microseconds beyond them."""
    seconds, microseconds = map(int, answer)
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


def _as_claims(answers: list[Any], chunks: Sequence[bytes]) -> np.ndarray | None:
    """``[n]`` int8 of ``Claim``; None if the member is not known."""
    if None in answers:
        return None
    return _as_bytes(answers, chunks, CLAIMS).view(np.int8)


def _as_published(answers: list[Any], chunks: Sequence[bytes]) -> np.ndarray:
    """``[n]`` int8 of ``Published``."""
    return _as_bytes(answers, chunks, PUBLISHED).view(np.int8)


def _as_given_up(answers: list[Any], chunks: Sequence[bytes]) -> np.ndarray:
    """``[n]`` bool."""
    return _as_bytes(answers, chunks, GIVEN_UP).view(bool)


def _as_bytes(answers: list[Any], chunks: Sequence[bytes], allowed: bytes) -> np.ndarray:
    """``[n]`` uint8: one byte per key."""
    for answer, chunk in zip(answers, chunks, strict=True):
        if len(answer) != _num_keys(chunk):
            raise ValueError(f"{_num_keys(chunk)} bytes were expected, got {len(answer)}")
    packed = b"".join(answers)
    if packed.strip(allowed):
        raise ValueError(f"bytes of {allowed!r} were expected")
    return np.frombuffer(bytearray(packed), np.uint8)


def _as_holders(answers: list[Any], chunks: Sequence[bytes]) -> Holders:
    """For each key the names of pools, by index into lists of names; none of the last keys."""
    found: Holders = []
    for (lists, indices), chunk in zip(answers, chunks, strict=True):
        names: Holders = [(), *map(_names, json.loads(lists.decode()))]
        known = [names[index] for index in np.frombuffer(indices, INDEX).tolist()]
        missing = _num_keys(chunk) - len(known)
        if missing < 0:
            raise ValueError(f"holders of {_num_keys(chunk)} keys were expected, got {len(known)}")
        found += known
        found += [()] * missing
    return found


def _names(pools: Any) -> tuple[str, ...]:
    if not isinstance(pools, list) or not all(isinstance(name, str) for name in pools):
        raise ValueError("names of pools were expected")
    return tuple(sorted(pools))


def _as_page(answers: list[Any]) -> tuple[int, np.ndarray]:
    """The next cursor, and ``[k, 2]`` keys."""
    ((cursor, keys),) = answers
    return _as_integer(int(cursor), (1 << 64) - 1), np.frombuffer(keys, "<u8").reshape(-1, 2).copy()


def _as_swept(answers: list[Any]) -> tuple[bool, list[str]]:
    """Whether there is more to do, and the names of pools that are done."""
    ((more, *names),) = answers
    return _as_integer(more, 1) == 1, [name.decode() for name in names]


def _num_keys(chunk: bytes) -> int:
    return len(chunk) // KEY_BYTES
