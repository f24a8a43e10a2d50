"""Check a server's answers: anything unexpected is a ``ValueError``."""

import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from .arguments import KEY_BYTES, as_member
from .base import Claim, Holders, Member, Published

INDEX = np.dtype("<u4")
CLAIMS = bytes(Claim)
PUBLISHED = bytes(Published)
GIVEN_UP = bytes((False, True))


def as_integer(answer: Any, high: int) -> int:
    """An integer from 0 to high."""
    if not isinstance(answer, int) or not 0 <= answer <= high:
        raise ValueError(f"an integer from 0 to {high} was expected")
    return answer


def as_done(answers: list[Any]) -> bool:
    """Whether the last of some scripts, each of which reports this, has done something."""
    return [as_integer(answer, 1) for answer in answers][-1] == 1


def as_time_ms(answer: Any) -> int:
    """The server's clock, of two strings: seconds, and microseconds beyond them."""
    seconds, microseconds = map(int, answer)
    return seconds * 1000 + microseconds // 1000


def as_members(answers: list[Any]) -> list[Member]:
    """Members by name, from the entries that they wrote."""
    (entries,) = answers
    members = []
    for entry in entries:
        document = json.loads(entry)
        names = {field.name for field in fields(Member)}
        values = {name: value for name, value in document.items() if name in names}
        members.append(as_member("members", Member(**values)))
    return sorted(members, key=lambda member: member.name)


def as_claims(answers: list[Any], chunks: Sequence[bytes]) -> np.ndarray | None:
    """``[n]`` int8 of ``Claim``; None if the member is not known."""
    if None in answers:
        return None
    return _as_bytes(answers, chunks, CLAIMS).view(np.int8)


def as_published(answers: list[Any], chunks: Sequence[bytes]) -> np.ndarray:
    """``[n]`` int8 of ``Published``."""
    return _as_bytes(answers, chunks, PUBLISHED).view(np.int8)


def as_given_up(answers: list[Any], chunks: Sequence[bytes]) -> np.ndarray:
    """``[n]`` bool."""
    return _as_bytes(answers, chunks, GIVEN_UP).view(bool)


def _as_bytes(answers: list[Any], chunks: Sequence[bytes], allowed: bytes) -> np.ndarray:
    """``[n]`` uint8: one byte per key."""
    for answer, chunk in zip(answers, chunks, strict=True):
        if len(answer) != num_keys(chunk):
            raise ValueError(f"{num_keys(chunk)} bytes were expected, got {len(answer)}")
    packed = b"".join(answers)
    if packed.strip(allowed):
        raise ValueError(f"bytes of {allowed!r} were expected")
    return np.frombuffer(bytearray(packed), np.uint8)


def as_holders(answers: list[Any], chunks: Sequence[bytes]) -> Holders:
    """For each key the names of pools, by index into lists of names; none of the last keys."""
    found: Holders = []
    for (lists, indices), chunk in zip(answers, chunks, strict=True):
        names: Holders = [(), *map(_names, json.loads(lists.decode()))]
        known = [names[index] for index in np.frombuffer(indices, INDEX).tolist()]
        missing = num_keys(chunk) - len(known)
        if missing < 0:
            raise ValueError(f"holders of {num_keys(chunk)} keys were expected, got {len(known)}")
        found += known
        found += [()] * missing
    return found


def _names(pools: Any) -> tuple[str, ...]:
    if not isinstance(pools, list) or not all(isinstance(name, str) for name in pools):
        raise ValueError("names of pools were expected")
    return tuple(sorted(pools))


def as_page(answers: list[Any]) -> tuple[int, np.ndarray]:
    """The next cursor, and ``[k, 2]`` keys."""
    ((cursor, keys),) = answers
    return as_integer(int(cursor), (1 << 64) - 1), np.frombuffer(keys, "<u8").reshape(-1, 2).copy()


def as_swept(answers: list[Any]) -> tuple[bool, list[str]]:
    """Whether there is more to do, and the names of pools that are done."""
    ((more, *names),) = answers
    return as_integer(more, 1) == 1, [name.decode() for name in names]


def num_keys(chunk: bytes) -> int:
    return len(chunk) // KEY_BYTES
