"""Calls for many values: the backend is called once for all of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from mooncake_kernels.buffers import as_buffer
from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural
from .backend import LocalBackend
from .buffers import Memory, Places
from .codes import (
    FAILURES,
    INVALID_PARAMS,
    Answer,
    Otherwise,
    check_list,
    code_of,
    fill,
    log,
)
from .replicate_config import ReplicateConfig, put_options
from .setup import Setup

_RANGES = "get_into_ranges"

Numbers = Sequence[int]
Ranges = Sequence[Sequence[int]]  # for each key, its ranges


class Value(NamedTuple):
    """A value to be put."""

    name: str
    parts: Sequence[Any]


class Batches:
    """Batches of values of a store. Over several hosts the directory is asked once, and each host,
    however many values it are. A batch continues after a failure. Thread-safe.
    """

    def __init__(self, setup: Setup):
        self._setup = setup

    def put(
        self,
        op: str,
        codes: list[int],
        values: Mapping[int, Sequence[Value]],
        config: ReplicateConfig | None,
        *,
        replace: bool,
    ) -> list[int]:
        """Store values, those of some keys by their indices, and return ``codes`` with the keys'
        results filled in: 0, or the code of its first value that failed.
        """

        def put() -> list[int]:
            named = [value for some in values.values() for value in some]
            results = iter(
                self._setup.running().backend.put_each(
                    op,
                    [value.name for value in named],
                    [value.parts for value in named],
                    put_options(config),
                    replace=replace,
                )
            )
            each = [[next(results) for _ in some] for some in values.values()]
            return [next(filter(None, some), 0) for some in each]

        fill(op, codes, [*values], put)
        return codes

    def get(
        self,
        op: str,
        keys: Sequence[str],
        make: Callable[[memoryview], Answer],
        otherwise: Otherwise,
        name_of: Callable[[str], str] | None = None,
    ) -> list[Answer | Otherwise]:
        """What ``make`` makes of each key's value; ``otherwise`` where there is none.

        ``name_of`` returns the name of a key's value, which is the key without it.
        """
        check_list("keys", keys)
        names: dict[int, str] = {}

        def look_up(i: int) -> int:
            names[i] = keys[i] if name_of is None else name_of(keys[i])
            return 0

        found: list[Answer | int] = [code_of(op, partial(look_up, i)) for i in range(len(keys))]
        wanted = [*names.values()]
        fill(op, found, [*names], lambda: self._setup.running().backend.get_each(op, wanted, make))
        return [otherwise if isinstance(one, int) else one for one in found]

    def put_batch(
        self,
        op: str,
        keys: Sequence[str],
        values: Sequence[Any],
        config: ReplicateConfig | None,
        *,
        replace: bool = False,
    ) -> int:
        """Store values, none of which may be empty: 0, or the code of the first that failed."""
        self._setup.running()
        put_options(config)
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
        codes = self.put(op, [0] * len(keys), wanted, config, replace=replace)
        return next(filter(None, codes), 0)

    def put_from(
        self,
        op: str,
        keys: Sequence[str],
        pointers: Sequence,
        sizes: Sequence,
        depth: int,
        config: ReplicateConfig | None,
        *,
        replace: bool = False,
    ) -> list[int]:
        """Store values from memory: in one call of the pool, if everything is as usual.

        Args:
            op: name of the call, for the log.
            keys: of the values.
            pointers: with a depth of 1 the address of each value, with 2 those of its ranges.
            sizes: the same of sizes in bytes.
            depth: see above.
            config: how they are kept.
            replace: whether existing values are replaced.
        """
        try:
            backend, places = self._places(keys, pointers, sizes, depth, writes=False)
            options = put_options(config)
            codes = places and backend.put_at_once(op, keys, places, options, replace=replace)
        except FAILURES:  # values that were stored by then exist when they are put one by one
            codes = None
        return codes or self.put_each(
            op,
            keys,
            (pointers, sizes),
            partial(self._views_of, pointers, sizes, depth, writes=False),
            config,
            replace=replace,
        )

    def get_into(
        self, op: str, keys: Sequence[str], pointers: Sequence, sizes: Sequence, depth: int
    ) -> list[int]:
        """Copy values into memory, see ``put_from``: for each its size, or a code."""
        try:
            backend, places = self._places(keys, pointers, sizes, depth, writes=True)
            codes = places and backend.get_at_once(op, keys, places)
        except FAILURES:
            codes = None
        return codes or self.get_each(
            op,
            keys,
            (pointers, sizes),
            partial(self._views_of, pointers, sizes, depth, writes=True),
        )

    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Ranges],
        all_src_offsets: Sequence[Ranges],
        all_sizes: Sequence[Ranges],
    ) -> list[list[list[int]]]:
        """Copy ranges of values into memory: for each its bytes, or a code."""
        check_list("buffer_ptrs", buffer_ptrs)
        columns = (all_dst_offsets, all_src_offsets, all_sizes)
        try:
            check_list("all_keys", all_keys, 2)
            for column in columns:
                check_list("offsets and sizes", column, 3)
            if any(len(column) != len(buffer_ptrs) for column in (all_keys, *columns)):
                raise InvalidArgument("the lists must be as long as buffer_ptrs, got others")
        except InvalidArgument as error:
            log.error("%s: %s", _RANGES, error)
            return [[[INVALID_PARAMS]] for _ in buffer_ptrs]
        return [
            self._into_buffer(*one) for one in zip(buffer_ptrs, all_keys, *columns, strict=True)
        ]

    def put_each(
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

        codes = self.each(op, keys, columns, look_up)
        return self.put(op, codes, values, config, replace=replace)

    def get_each(
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

        codes = self.each(op, keys, columns, look_up)
        if views:
            wanted = [keys[i] for i in views]
            copied = self._setup.running().backend.get_into_each(op, wanted, [*views.values()])
            for i, code in zip(views, copied, strict=True):
                codes[i] = code
        return codes

    def views(self, pointers: Numbers, sizes: Numbers, *, writes: bool) -> list[Memory]:
        check_list("buffer_ptrs", pointers)
        check_list("sizes", sizes)
        if len(pointers) != len(sizes):
            raise InvalidArgument(
                f"sizes must be as many as buffer_ptrs, got {len(sizes)} and {len(pointers)}"
            )
        view = self._setup.running().buffers.view
        return [view(*one, writes=writes) for one in zip(pointers, sizes, strict=True)]

    def each(
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

    def _places(
        self, keys: Sequence[str], pointers: Sequence, sizes: Sequence, depth: int, *, writes: bool
    ) -> tuple[LocalBackend, Places | None]:
        """The backend, and the memory of each key; None: something about these is unusual, or it is
        a single range, which is faster by itself.
        """
        running = self._setup.running()
        are_names = isinstance(keys, list | tuple) and set(map(type, keys)) == {str}
        if not are_names or (len(keys) == 1 and depth == 1):
            return running.backend, None
        places = running.buffers.places(pointers, sizes, depth, writes=writes)
        is_right = places is not None and len(places.sizes) == len(keys)
        return running.backend, places if is_right else None

    def _views_of(
        self, pointers: Sequence, sizes: Sequence, depth: int, i: int, *, writes: bool
    ) -> list[Memory]:
        if depth == 1:
            return self.views([pointers[i]], [sizes[i]], writes=writes)
        return self.views(pointers[i], sizes[i], writes=writes)

    def _into_buffer(
        self,
        pointer: int,
        keys: Sequence[str],
        dst_offsets: Ranges,
        src_offsets: Ranges,
        sizes: Ranges,
    ) -> list[list[int]]:
        columns = (dst_offsets, src_offsets, sizes)

        def num_ranges(k: int) -> int:  # of the longest list
            return max([len(column[k]) for column in columns if k < len(column)], default=1)

        def one(get_range: Callable[[int, Memory], int], k: int, r: int) -> int:
            if not all(
                len(column) == len(keys) and len(column[k]) == num_ranges(k) for column in columns
            ):
                raise InvalidArgument("offsets and sizes must be lists of one shape, got others")
            return self._copy_range(
                get_range, pointer, dst_offsets[k][r], src_offsets[k][r], sizes[k][r]
            )

        def each(k: int) -> list[int]:
            backend, count = self._setup.running().backend, num_ranges(k)
            # A single range is compared with the checksum while it is copied.
            many = count > 1
            get_range = backend.ranges_of(keys[k]) if many else partial(backend.get_range, keys[k])
            return [code_of(_RANGES, partial(one, get_range, k, r)) for r in range(count)]

        codes = [[0] * num_ranges(k) for k in range(len(keys))]
        for k, some in enumerate(codes):
            fill(_RANGES, some, range(len(some)), partial(each, k))
        return codes

    def _copy_range(
        self,
        get_range: Callable[[int, Memory], int],
        pointer: int,
        dst_offset: int,
        src_offset: int,
        size: int,
    ) -> int:
        if as_natural("size", size) == 0:
            return 0
        skipped = as_natural("dst_offset", dst_offset)
        view = self._setup.running().buffers.view(pointer, size, writes=True, skipped=skipped)
        return get_range(as_natural("src_offset", src_offset), view)


def check_columns(keys: Sequence[str], columns: Sequence[Sequence]) -> None:
    """Refuse what is not a list as long as that of the keys."""
    for column in columns:
        check_list("what belongs to keys", column)
    if any(len(column) != len(keys) for column in columns):
        raise InvalidArgument(
            f"the other lists must be as long as keys, got "
            f"{', '.join(str(len(column)) for column in columns)} and {len(keys)}"
        )
