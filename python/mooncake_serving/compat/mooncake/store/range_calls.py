"""``get_into_ranges``: parts of values, for example single layers."""

from collections.abc import Callable, Sequence
from functools import partial

from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural
from .buffers import Memory
from .codes import INVALID_PARAMS, check_list, code_of, fill, log, returns_instead
from .lifecycle import Lifecycle

_OP = "get_into_ranges"

Ranges = Sequence[Sequence[int]]  # for each key, its ranges


class RangeCalls(Lifecycle):
    """Lists of lists: for each buffer its keys, for each key its ranges."""

    @returns_instead([[[INVALID_PARAMS]]])
    def get_into_ranges(
        self,
        buffer_ptrs: Sequence[int],
        all_keys: Sequence[Sequence[str]],
        all_dst_offsets: Sequence[Ranges],
        all_src_offsets: Sequence[Ranges],
        all_sizes: Sequence[Ranges],
    ) -> list[list[list[int]]]:
        """Copy ranges of values into memory.

        Equivalent to::

            for b, k, r in all ranges r of all keys k of all buffers b:
                value = get(all_keys[b][k])[all_src_offsets[b][k][r] :][: all_sizes[b][k][r]]
                memory[buffer_ptrs[b] + all_dst_offsets[b][k][r] :] = value

        Returns:
            For each range its bytes; -704 if there is no such value, -600 if the range is not in
            it.
        """
        check_list("buffer_ptrs", buffer_ptrs)
        columns = (all_dst_offsets, all_src_offsets, all_sizes)
        try:
            check_list("all_keys", all_keys, 2)
            for column in columns:
                check_list("offsets and sizes", column, 3)
            if any(len(column) != len(buffer_ptrs) for column in (all_keys, *columns)):
                raise InvalidArgument("the lists must be as long as buffer_ptrs, got others")
        except InvalidArgument as error:
            log.error("%s: %s", _OP, error)
            return [[[INVALID_PARAMS]] for _ in buffer_ptrs]
        return [
            self._into_buffer(*one) for one in zip(buffer_ptrs, all_keys, *columns, strict=True)
        ]

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
            return self._copy(get_range, pointer, dst_offsets[k][r], src_offsets[k][r], sizes[k][r])

        def each(k: int) -> list[int]:
            objects, count = self._running().objects, num_ranges(k)
            # A single range is compared with the checksum while it is copied.
            many = count > 1
            get_range = objects.ranges_of(keys[k]) if many else partial(objects.get_range, keys[k])
            return [code_of(_OP, partial(one, get_range, k, r)) for r in range(count)]

        codes = [[0] * num_ranges(k) for k in range(len(keys))]
        for k, some in enumerate(codes):
            fill(_OP, some, range(len(some)), partial(each, k))
        return codes

    def _copy(
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
        view = self._running().buffers.view(pointer, size, writes=True, skipped=skipped)
        return get_range(as_natural("src_offset", src_offset), view)
