"""Whose a pool's file may be, and who may write to it."""

import grp
import pwd
from collections.abc import Callable
from typing import Any

from .._arguments import as_integer
from ..errors import InvalidArgument

MAX_ID = (1 << 32) - 2  # the kernel takes the next one for none


def as_user(op: str, owner: Any) -> int | None:
    """The id of a user, given by it or by name."""
    return _as_id(op, "owner", owner, lambda name: pwd.getpwnam(name).pw_uid)


def as_group(op: str, group: Any) -> int | None:
    """The id of a group, given by it or by name."""
    return _as_id(op, "group", group, lambda name: grp.getgrnam(name).gr_gid)


def _as_id(op: str, name: str, value: Any, find: Callable[[str], int]) -> int | None:
    if value is None:
        return None
    if not isinstance(value, str):
        return as_integer(op, name, value, 0, MAX_ID)
    try:
        return find(value)
    except (KeyError, ValueError):
        raise InvalidArgument(
            f"{op}: {name} must be an id or a name that this machine knows, got {value!r:.80}"
        ) from None
