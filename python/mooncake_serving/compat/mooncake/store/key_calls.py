"""The calls of ``MooncakeDistributedStore`` that do not move values."""

import re
from collections.abc import Iterator, Sequence
from itertools import islice

from mooncake_kernels.errors import InvalidArgument

from .codes import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    OBJECT_NOT_FOUND,
    check_list,
    or_else,
    returns_code,
    returns_instead,
)
from .lifecycle import Lifecycle
from .naming import as_text
from .objects import Objects

_REMOVED_AT_ONCE = 1024


class KeyCalls(Lifecycle):
    """``force`` is ignored: no lease prevents a removal, since current readers keep the value."""

    @returns_code
    def is_exist(self, key: str) -> int:
        """Return 1 if there is a value, else 0."""
        return int(self._running().objects.exist([key])[0])

    @returns_instead([INTERNAL_ERROR])
    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Check many keys, in one look at the store: 1 or 0 each; all -1 on failure."""
        check_list("keys", keys)
        return or_else(
            "batch_is_exist",
            lambda: list(map(int, self._running().objects.exist(keys))),
            lambda: [INTERNAL_ERROR] * len(keys),
        )

    @returns_code
    def get_size(self, key: str) -> int:
        """Return the size of a value in bytes; -704 if there is none."""
        return self._running().objects.num_bytes(key)

    @returns_code
    def remove(self, key: str, force: bool = False) -> int:
        """Remove a value: 0; -704 if there is none."""
        return 0 if self._running().objects.remove(key) else OBJECT_NOT_FOUND

    @returns_instead([INVALID_PARAMS])
    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """Remove values: for each what ``remove`` returns."""
        check_list("keys", keys)
        return or_else(
            "batch_remove",
            lambda: self._running().objects.remove_each("batch_remove", keys),
            lambda: [INVALID_PARAMS] * len(keys),
        )

    @returns_code
    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove values whose key has a match of Python's ``re`` anywhere; returns how many.

        Looks at every object.
        """
        objects = self._running().objects
        try:
            pattern = re.compile(as_text(regex_pattern, 0))
            pattern.search("")  # one of bytes finds nothing in a text
        except (re.error, TypeError) as error:
            raise InvalidArgument(
                f"regex_pattern must be a regular expression ({error}), got {regex_pattern!r:.80}"
            ) from None
        found = (name for name in objects.names() if pattern.search(name))
        return _remove("remove_by_regex", objects, found)

    @returns_code
    def remove_all(self, force: bool = False) -> int:
        """Remove all values of this tenant; returns how many there were."""
        objects = self._running().objects
        return _remove("remove_all", objects, objects.names())


def _remove(op: str, objects: Objects, names: Iterator[str]) -> int:
    """Remove objects: how many there were, or the first code of those that could not be removed."""
    count = 0
    while some := list(islice(names, _REMOVED_AT_ONCE)):
        codes = objects.remove_each(op, some)
        count += codes.count(0)
        if failed := [code for code in codes if code not in (0, OBJECT_NOT_FOUND)]:
            return failed[0]
    return count
