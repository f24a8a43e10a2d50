"""Objects that have names, in a store of this host."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

from mooncake_kernels.buffers import as_buffer
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import PinnedObject, PutResult, Retention
from mooncake_serving.store import Store
from mooncake_serving.store.keyspace import Keyspace

from ..codes import Failed
from .codes import INTERNAL_ERROR, NO_AVAILABLE_HANDLE
from .naming import header_of, name_in

_REPLACE_S = 10.0  # to replace an object that others write too
_PAUSE_S = 1e-3


class Objects:
    """What is in the store under names of one namespace. Thread-safe.

    An object is its header and its value, as two parts that are written and read in one call.
    Names are ``key`` in errors, as callers call them.
    """

    def __init__(self, store: Store, namespace: str):
        self.store = store
        self._keyspace = Keyspace(namespace)

    def put(self, name: str, parts: Sequence[Any], retention: Retention) -> None:
        """Store a value, if there is none of this name: else what is there stays.

        Raises:
            InvalidArgument: an argument is wrong, or the value empty.
            Failed: there is no room.
        """
        self._check(name, parts)
        self._put(name, parts, retention)

    def replace(self, name: str, parts: Sequence[Any], retention: Retention) -> None:
        """Store a value in the place of what is there. Who reads that keeps it.

        Raises:
            InvalidArgument, Failed: as in ``put``; but if there is no room, what was there is gone.
        """
        self._check(name, parts)
        until_s = time.monotonic() + _REPLACE_S
        while True:
            self.store.remove(name)
            if self._put(name, parts, retention) is PutResult.STORED:
                return
            if time.monotonic() > until_s:
                raise Failed(INTERNAL_ERROR, f"others write {name!r:.80} all the time")
            time.sleep(_PAUSE_S)

    def get_into(self, name: str, views: Sequence[memoryview]) -> int | None:
        """Copy a value into buffers, one behind the other, which may be larger than it.

        Returns:
            Its size; None if there is none.

        Raises:
            InvalidArgument: the buffers are too small.
            ChecksumError: it was verified and is damaged.
        """
        header = header_of(name)
        found = bytearray(len(header))
        num_bytes = self.store.get_into(name, found, *views)
        return None if num_bytes is None or found != header else num_bytes - len(header)

    def get_range(self, name: str, offset: int, view: memoryview) -> int | None:
        """Fill a buffer from a part of a value; returns its size, None if there is none.

        Raises:
            InvalidArgument: the part is not within the value.
        """
        num_bytes = self.store.get_into(name, view, offset=len(header_of(name)) + offset)
        return None if num_bytes is None else len(view)

    def view(self, name: str) -> tuple[PinnedObject, int] | None:
        """An object where it is, and where its value begins in it; None if there is none."""
        header = header_of(name)
        pinned = self.store.view(name)
        if pinned is None or pinned.view[: len(header)] != header:
            return None
        return pinned, len(header)

    def num_bytes(self, name: str) -> int | None:
        """The size of a value; None if there is none."""
        header = header_of(name)
        num_bytes = self.store.get_into(name, bytearray(len(header)), offset=0)
        return None if num_bytes is None else num_bytes - len(header)

    def exist(self, names: Sequence[str]) -> list[bool]:
        """Tell of names which are there. Not a use of them."""
        for name in names:
            if not isinstance(name, str):
                raise InvalidArgument(f"key must be a string, got {name!r:.80}")
        return self.store.exists_each(names).tolist() if len(names) else []

    def remove(self, name: str) -> bool:
        """Remove an object; who reads it keeps it. Returns whether it was there."""
        header_of(name)
        return self.store.remove(name)

    def names(self) -> Iterator[str]:
        """All names that are there, in no order. Reads each object's header."""
        pool = self.store.pool
        for key in map(tuple, pool.objects().keys.tolist()):
            pinned = pool.pin(key)
            if pinned is None:
                continue
            with pinned:
                name = name_in(pinned.view)
            if name is not None and self._keyspace.key(name) == key:
                yield name

    def close(self) -> None:
        self.store.close()

    def _check(self, name: str, parts: Sequence[Any]) -> None:
        num_bytes = sum(as_buffer(part, argument="value").num_bytes for part in parts)
        if num_bytes == 0:
            raise InvalidArgument("value must have at least 1 byte, got none")
        capacity_bytes = self.store.pool.capacity_bytes
        if len(header_of(name)) + num_bytes > capacity_bytes:
            raise Failed(
                NO_AVAILABLE_HANDLE,
                f"value and key must fit into the pool's {capacity_bytes} bytes, got {num_bytes}",
            )

    def _put(self, name: str, parts: Sequence[Any], retention: Retention) -> PutResult:
        result = self.store.put_from(name, header_of(name), *parts, retention=retention)
        if result is PutResult.FULL:
            raise Failed(
                NO_AVAILABLE_HANDLE, f"there is no room for {name!r:.80}: all must stay that is"
            )
        return result
