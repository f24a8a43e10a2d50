"""The half of ``ObjectPool`` that finds and reads objects, without locks."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from .. import _host
from .._arguments import as_bool
from ..closing import Closing
from ..errors import InvalidArgument, shown
from .handles import PinnedObject
from .reads import ABSENT, DONE, as_headed, as_offset, failed_read, with_buffers
from .values import Key, as_key, as_keys


class PoolReader(Closing):
    """All of a pool that does not change it. A context manager around ``close()``.

    Attributes:
        path: where other processes open it.
        capacity_bytes: for objects, each rounded up to ``alignment``.
        alignment: of objects, in bytes.
        num_pins: how many objects this process can read at once.
        device: the GPU that holds the objects; None: they are in host memory.
    """

    def __init__(self, native: _host.ObjectPool | None = None):
        if not isinstance(native, _host.ObjectPool):
            raise InvalidArgument(
                "ObjectPool: make one by ObjectPool.create(capacity_bytes) or "
                f"ObjectPool.open(path), got {shown(native)}"
            )
        self.path = native.path
        self.capacity_bytes = native.capacity_bytes
        self.alignment = native.alignment
        self.num_pins = native.num_pins
        self.device: int | None = None if native.device < 0 else native.device
        self._native: _host.ObjectPool | None = native

    def contains(self, key: Key) -> bool:
        """Tell whether an object can be read. Does not count as a use."""
        return self._pool.contains(*as_key("contains", key))

    def contains_each(self, keys: Any, *, or_written: bool = False) -> np.ndarray:
        """Tell which of ``[n, 2]`` keys are present: ``[n]`` bool. ``or_written``: or are being
        written, by any living process.
        """
        as_bool("contains_each", "or_written", or_written)
        return self._pool.contains_each(as_keys("contains_each", keys), or_written)

    def ids_of(self, keys: Any) -> np.ndarray:
        """Return the ids of the objects under ``[n, 2]`` keys: ``[n]`` uint64, see
        ``PoolObjects.ids``; 0 where there is none.
        """
        return self._pool.ids_of(as_keys("ids_of", keys))

    def match_prefix(self, keys: Any) -> int:
        """Count the leading ``[n, 2]`` keys that are present, up to the first that is not.

        Equivalent to::

            count = 0
            while count < n and pool.contains(keys[count]):
                count += 1

        No promise: objects may be evicted before they are pinned.
        """
        return self._pool.match_prefix(as_keys("match_prefix", keys))

    def pin(self, key: Key, *, touch: bool = True) -> PinnedObject | None:
        """Pin an object for reading in place; None if there is none.

        Args:
            key: of the object.
            touch: whether it counts as a use: False for whoever manages objects, and is not the
                reader they are kept for.

        Raises:
            InvalidArgument: an argument is wrong.
            Unavailable: this process already reads ``num_pins`` objects.
        """
        as_bool("pin", "touch", touch)
        pin = self._pool.pin(*as_key("pin", key), touch)
        return None if pin is None else PinnedObject(pin)

    def get_into(
        self, key: Key, *buffers: Any, offset: int | None = None, verify: bool = False
    ) -> int | None:
        """Copy an object, or a part of it, into consecutive buffers. Counts as a use.

        Args:
            key: of the object.
            *buffers: packed, writable memory. Without an offset they take the whole object and may
                be larger. The copy to a GPU runs after the work queued in its library's current
                stream, and is done when this returns.
            offset: where in the object to begin; then all buffers are filled.
            verify: compare the whole object with the checksum it was stored with, if any.

        Returns:
            Size of the object; None if there is none.

        Raises:
            InvalidArgument: the buffers are too small, or the range is not inside the object.
            ChecksumError: the object is damaged. Nothing of it is in the buffers, which have zeros
                instead if they and the pool are all in host memory.
            Unavailable, CudaError: from the driver, if a buffer is on a GPU.
        """
        words, native = as_key("get_into", key), self._native or self._pool
        start = None if offset is None else as_offset(offset)
        if type(verify) is not bool:
            as_bool("get_into", "verify", verify)
        outcome, object_bytes = with_buffers(
            "get_into", buffers, True, partial(native.read, *words, start), verify
        )
        if outcome == DONE:
            return object_bytes
        if outcome == ABSENT:
            return None
        raise failed_read(outcome, object_bytes, key, offset, buffers)

    def get_into_each(self, keys: Any, buffers: Any, *, verify: bool = False) -> np.ndarray:
        """Copy many whole objects, each into its own buffer, in one call.

        Args:
            keys: ``[n, 2]``.
            buffers: n pieces of packed, writable memory, see ``get_into``, each at least as large
                as its object.
            verify: as in ``get_into``, as is what buffers of damaged objects hold.

        Returns:
            ``[n]`` int64: sizes of the objects; -1 where there is none, -2 where the buffer is too
            small, -4 where the object is damaged.

        Raises:
            InvalidArgument: an argument is wrong.
        """
        words, read_each = as_keys("get_into_each", keys), self._pool.read_each
        as_bool("get_into_each", "verify", verify)
        try:
            num_buffers = len(buffers)
        except TypeError:
            raise InvalidArgument(
                f"get_into_each: buffers must be a list of buffers, got {shown(buffers)}"
            ) from None
        if num_buffers != len(words):
            raise InvalidArgument(
                f"get_into_each: buffers must be as many as keys, got {num_buffers} and "
                f"{len(words)}"
            )
        return with_buffers("get_into_each", buffers, True, partial(read_each, words), verify)

    def get_headed(
        self,
        keys: Any,
        heads: Sequence[bytes],
        addresses: Any,
        sizes: Any,
        *,
        free: tuple[int, int] = (0, 0),
        verify: bool = False,
    ) -> np.ndarray:
        """Copy what follows the heads of many objects into host memory given by address, in one
        call. Of a pool in host memory.

        Args:
            keys: ``[n, 2]``.
            heads: n of them, what each object must begin with.
            addresses: ``[n, w]``: up to w places for each object, which are filled in order and may
                be larger. That they are valid is not checked.
            sizes: ``[n, w]``: their bytes, 0 for none.
            free: where heads may differ, from and to.
            verify: as in ``get_into_each``.

        Returns:
            ``[n]`` int64: how many bytes follow; -1, -2, -4: as ``get_into_each``; -5: the object
            begins differently, and nothing was copied.

        Raises:
            InvalidArgument: an argument is wrong; nothing was copied.
            Unavailable: this process already reads ``num_pins`` objects.
        """
        op, native = "get_headed", self._pool
        words = as_keys(op, keys)
        as_bool(op, "verify", verify)
        placed = as_headed(op, len(words), heads, addresses, sizes)
        if self.device is not None:
            raise InvalidArgument(
                f"{op}: pool must be in host memory, got one on GPU {self.device}"
            )
        begin, end = free
        if not 0 <= begin <= end <= min(map(len, heads), default=end):
            raise InvalidArgument(f"{op}: free must be a range within each head, got {free}")
        return native.read_headed(words, placed[0], free, *placed[1:], verify)

    def close(self) -> None:
        """Stop using the pool; open pins and puts remain valid until they end. Idempotent."""
        self._native = None

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self._native is None

    @property
    def _pool(self) -> _host.ObjectPool:
        """The native pool. ``_native or _pool`` is the same, and faster."""
        if self._native is None:
            raise InvalidArgument(
                f"ObjectPool: pool must be open, got the closed {shown(self.path)}"
            )
        return self._native
