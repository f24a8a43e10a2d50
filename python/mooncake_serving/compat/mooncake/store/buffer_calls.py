"""The calls of ``MooncakeDistributedStore`` that move values to and from memory by address."""

from collections.abc import Callable, Sequence
from functools import partial

from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural
from .batch_calls import BatchCalls, Value
from .buffers import Memory, Places
from .codes import (
    FAILURES,
    INVALID_PARAMS,
    check_list,
    code_of,
    returns_code,
    returns_instead,
)
from .objects import Objects
from .replicate_config import ReplicateConfig, keeping_of

Numbers = Sequence[int]


class BufferCalls(BatchCalls):
    """Addresses are of memory of the host or of a GPU, used directly if it is registered, and
    otherwise looked up. A GPU copies after everything in torch's current stream.

    A batch returns one code per key, and continues after a failure.
    """

    @returns_code
    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Remember memory that other calls use: 0; -600 if it overlaps registered memory.

        The caller keeps it alive.
        """
        running = self._running()
        memory = running.buffers.register(buffer_ptr, size)
        try:
            running.objects.register(memory)
        except BaseException:
            running.buffers.unregister(buffer_ptr)
            raise
        return 0

    @returns_code
    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Undo ``register_buffer``: 0; -600 if no registered range begins there."""
        running = self._running()
        running.buffers.unregister(buffer_ptr)
        running.objects.deregister(buffer_ptr)
        return 0

    @returns_code
    def put_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        """Store a value from memory: 0, -200 or -600. Zero bytes store no value: 0."""
        if as_natural("size", size) == 0:
            return 0
        running = self._running()
        view = running.buffers.view(buffer_ptr, size, writes=False)
        running.objects.put(key, [view], keeping_of(config))
        return 0

    @returns_code
    def put_from_with_metadata(
        self,
        key: str,
        buffer_ptr: int,
        metadata_buffer_ptr: int,
        size: int,
        metadata_size: int,
        config: ReplicateConfig | None = None,
    ) -> int:
        """Store a value of two parts from memory, the metadata first: 0, -200 or -600."""
        parts = [(metadata_buffer_ptr, metadata_size), (buffer_ptr, size)]
        running = self._running()
        views = [running.buffers.view(*part, writes=False) for part in parts]
        running.objects.put(key, views, keeping_of(config))
        return 0

    @returns_code
    def upsert_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        """``put_from`` that replaces an existing value, see ``upsert``."""
        running = self._running()
        view = running.buffers.view(buffer_ptr, size, writes=False)
        running.objects.replace(key, [view], keeping_of(config))
        return 0

    @returns_instead([INVALID_PARAMS])
    def batch_put_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Numbers,
        sizes: Numbers,
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store values from memory: 0, -200 or -600 each."""
        codes = self._put_at_once("batch_put_from", keys, buffer_ptrs, sizes, 1, config)
        return codes or self._put_each(
            "batch_put_from",
            keys,
            (buffer_ptrs, sizes),
            lambda i: self._views([buffer_ptrs[i]], [sizes[i]], writes=False),
            config,
        )

    @returns_instead([INVALID_PARAMS])
    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Numbers,
        sizes: Numbers,
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """``batch_put_from`` that replaces existing values, see ``upsert``."""
        codes = self._put_at_once(
            "batch_upsert_from", keys, buffer_ptrs, sizes, 1, config, replace=True
        )
        return codes or self._put_each(
            "batch_upsert_from",
            keys,
            (buffer_ptrs, sizes),
            lambda i: self._views([buffer_ptrs[i]], [sizes[i]], writes=False),
            config,
            replace=True,
        )

    @returns_instead([INVALID_PARAMS])
    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Numbers],
        all_sizes: Sequence[Numbers],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store values, each from many ranges of memory: 0, -200 or -600 each."""
        codes = self._put_at_once(
            "batch_put_from_multi_buffers", keys, all_buffer_ptrs, all_sizes, 2, config
        )
        return codes or self._put_each(
            "batch_put_from_multi_buffers",
            keys,
            (all_buffer_ptrs, all_sizes),
            lambda i: self._views(all_buffer_ptrs[i], all_sizes[i], writes=False),
            config,
        )

    @returns_code
    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Copy a value into memory, which may be larger.

        Returns:
            The size of the value in bytes; -704 if there is none, -600 if the memory is too small.
        """
        running = self._running()
        return running.objects.get_into(key, [running.buffers.view(buffer_ptr, size, writes=True)])

    @returns_instead([INVALID_PARAMS])
    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Numbers, sizes: Numbers
    ) -> list[int]:
        """Copy values into memory, each as ``get_into`` does."""
        codes = self._get_at_once("batch_get_into", keys, buffer_ptrs, sizes, 1)
        return codes or self._get_each(
            "batch_get_into",
            keys,
            (buffer_ptrs, sizes),
            lambda i: self._views([buffer_ptrs[i]], [sizes[i]], writes=True),
        )

    @returns_instead([INVALID_PARAMS])
    def batch_get_into_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Numbers],
        all_sizes: Sequence[Numbers],
        prefer_alloc_in_same_node: bool = False,
    ) -> list[int]:
        """Copy each value into ranges of memory, which are filled in order.

        Returns:
            As ``get_into``. ``prefer_alloc_in_same_node`` is ignored.
        """
        codes = self._get_at_once(
            "batch_get_into_multi_buffers", keys, all_buffer_ptrs, all_sizes, 2
        )
        return codes or self._get_each(
            "batch_get_into_multi_buffers",
            keys,
            (all_buffer_ptrs, all_sizes),
            lambda i: self._views(all_buffer_ptrs[i], all_sizes[i], writes=True),
        )

    def _put_at_once(
        self,
        op: str,
        keys: Sequence[str],
        pointers: Sequence,
        sizes: Sequence,
        depth: int,
        config: ReplicateConfig | None,
        *,
        replace: bool = False,
    ) -> list[int] | None:
        """``_put_each`` in one call of the pool, if everything is as usual; otherwise None."""
        try:
            objects, places = self._places(keys, pointers, sizes, depth, writes=False)
            keeping = keeping_of(config)
            return places and objects.put_at_once(op, keys, places, keeping, replace=replace)
        except FAILURES:  # what is stored by now is there already when it is put by itself
            return None

    def _get_at_once(
        self, op: str, keys: Sequence[str], pointers: Sequence, sizes: Sequence, depth: int
    ) -> list[int] | None:
        """``_get_each`` in one call of the pool, if everything is as usual; otherwise None."""
        try:
            objects, places = self._places(keys, pointers, sizes, depth, writes=True)
            return places and objects.get_at_once(op, keys, places)
        except FAILURES:
            return None

    def _places(
        self, keys: Sequence[str], pointers: Sequence, sizes: Sequence, depth: int, *, writes: bool
    ) -> tuple[Objects, Places | None]:
        """The objects, and the memory of each key; None: something about these is unusual, or it is
        a single range, which is faster by itself.
        """
        running = self._running()
        are_names = isinstance(keys, list | tuple) and set(map(type, keys)) == {str}
        if not are_names or (len(keys) == 1 and depth == 1):
            return running.objects, None
        places = running.buffers.places(pointers, sizes, depth, writes=writes)
        is_right = places is not None and len(places.sizes) == len(keys)
        return running.objects, places if is_right else None

    def _put_each(
        self,
        op: str,
        keys: Sequence[str],
        columns: Sequence[Sequence],
        views_of: Callable[[int], list[Memory]],
        config: ReplicateConfig | None,
        *,
        replace: bool = False,
    ) -> list[int]:
        """Store each key's value from its views, all those with valid memory in one call."""
        values: dict[int, list[Value]] = {}

        def look_up(i: int) -> int:
            values[i] = [Value(keys[i], views_of(i))]
            return 0

        codes = self._each(op, keys, columns, look_up)
        return self._put_values(op, codes, values, config, replace=replace)

    def _get_each(
        self,
        op: str,
        keys: Sequence[str],
        columns: Sequence[Sequence],
        views_of: Callable[[int], list[Memory]],
    ) -> list[int]:
        """Copy each key's value into its views, all those with valid memory in one call."""
        views: dict[int, list[Memory]] = {}

        def look_up(i: int) -> int:
            views[i] = views_of(i)
            return 0

        codes = self._each(op, keys, columns, look_up)
        if views:
            wanted = [keys[i] for i in views]
            copied = self._running().objects.get_into_each(op, wanted, [*views.values()])
            for i, code in zip(views, copied, strict=True):
                codes[i] = code
        return codes

    def _views(self, pointers: Numbers, sizes: Numbers, *, writes: bool) -> list[Memory]:
        check_list("buffer_ptrs", pointers)
        check_list("sizes", sizes)
        if len(pointers) != len(sizes):
            raise InvalidArgument(
                f"sizes must be as many as buffer_ptrs, got {len(sizes)} and {len(pointers)}"
            )
        view = self._running().buffers.view
        return [view(*one, writes=writes) for one in zip(pointers, sizes, strict=True)]

    def _each(
        self,
        op: str,
        keys: Sequence[str],
        columns: Sequence[Sequence],
        call: Callable[[int], int],
    ) -> list[int]:
        """The code of each key's call."""
        check_list("keys", keys)

        def one(i: int) -> int:
            check_columns(keys, columns)
            return call(i)

        return [code_of(op, partial(one, i)) for i in range(len(keys))]


def check_columns(keys: Sequence[str], columns: Sequence[Sequence]) -> None:
    """Refuse what is not a list as long as that of the keys."""
    for column in columns:
        check_list("what belongs to keys", column)
    if any(len(column) != len(keys) for column in columns):
        raise InvalidArgument(
            f"the other lists must be as long as keys, got "
            f"{', '.join(str(len(column)) for column in columns)} and {len(keys)}"
        )
