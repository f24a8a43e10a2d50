"""The calls of ``MooncakeDistributedStore`` that take and return values."""

from collections.abc import Sequence
from typing import Any

from mooncake_kernels.buffers import as_buffer
from mooncake_kernels.errors import InvalidArgument

from .batch_calls import BatchCalls, Value
from .codes import check_list, returns_code, returns_instead
from .handle import BufferHandle, handle_of
from .replicate_config import ReplicateConfig, keeping_of


class ValueCalls(BatchCalls):
    """A value is anything with a packed buffer. Putting an existing one has no effect: 0."""

    @returns_code
    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Store a value: 0; -200 if there is no room, -600 if it is empty."""
        self._running().objects.put(key, [value], keeping_of(config))
        return 0

    @returns_code
    def put_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """Store parts as one value, in order. No parts at all is no error: 0."""
        return self._put_parts(key, parts, config, replace=False)

    @returns_code
    def put_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None
    ) -> int:
        """Store values, none of which may be empty: 0, or the code of the first that failed, which
        does not keep others from being stored.
        """
        return self._put_batch("put_batch", keys, values, config, replace=False)

    @returns_code
    def upsert(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Store a value, replacing an existing one: 0, -200 or -600.

        For a moment the key has no value, and it stays so if there is no room.
        """
        self._running().objects.replace(key, [value], keeping_of(config))
        return 0

    @returns_code
    def upsert_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """``upsert`` with the parts of ``put_parts``."""
        return self._put_parts(key, parts, config, replace=True)

    @returns_code
    def upsert_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None
    ) -> int:
        """``upsert`` for many."""
        return self._put_batch("upsert_batch", keys, values, config, replace=True)

    @returns_instead(b"")
    def get(self, key: str) -> bytes:
        """Return a value; ``b""`` if there is none."""
        found = self._running().objects.view(key)
        return b"" if found is None else bytes(found)

    @returns_instead([b""])
    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """Return values, each as ``get`` does."""
        return self._get_values("get_batch", keys, bytes, b"")

    @returns_instead(None)
    def get_buffer(self, key: str) -> BufferHandle | None:
        """Return a value in place; it stays for as long as the handle lives. None: no value."""
        found = self._running().objects.view(key)
        return None if found is None else handle_of(found)

    @returns_instead([None])
    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """Return values, each as ``get_buffer`` does."""
        return self._get_values("batch_get_buffer", keys, handle_of, None)

    def _put_parts(
        self, key: str, parts: Sequence[Any], config: ReplicateConfig | None, *, replace: bool
    ) -> int:
        objects, keeping = self._running().objects, keeping_of(config)
        if any(as_buffer(part, argument="parts").num_bytes for part in parts):
            (objects.replace if replace else objects.put)(key, parts, keeping)
        return 0

    def _put_batch(
        self,
        op: str,
        keys: Sequence[str],
        values: Sequence[Any],
        config: ReplicateConfig | None,
        *,
        replace: bool,
    ) -> int:
        self._running()
        keeping_of(config)
        check_list("keys", keys)
        check_list("values", values)
        if len(keys) != len(values):
            raise InvalidArgument(
                f"values must be as many as keys, got {len(values)} and {len(keys)}"
            )
        empty = [i for i, value in enumerate(values) if not as_buffer(value).num_bytes]
        if empty:
            raise InvalidArgument(f"values must have at least 1 byte each, got none in {empty[:8]}")
        wanted = {i: [Value(keys[i], [value])] for i, value in enumerate(values)}
        codes = self._put_values(op, [0] * len(keys), wanted, config, replace=replace)
        return next(filter(None, codes), 0)
