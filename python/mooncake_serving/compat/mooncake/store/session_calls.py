"""The calls of ``MooncakeDistributedStore`` that write and read values range by range."""

from collections.abc import Sequence
from functools import partial

from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural
from .batches import Batches, Numbers
from .buffers import Memory
from .codes import INVALID_PARAMS, check_list, code_of, fill, returns_code, returns_instead
from .replicate_config import ReplicateConfig, put_options
from .sessions import ReadSpec, WriteSession
from .setup import Setup

_OPENED_AT_ONCE = 512  # that are pinned, and released if there are too many


class SessionCalls:
    """A value is begun once, written or read in as many calls as there are layers, and ended.

    Sessions belong to this store, and can be used by all its threads. ``close`` ends them; values
    that are being written then are discarded.
    """

    def __init__(self, setup: Setup, batches: Batches):
        self._setup = setup
        self._batches = batches

    @returns_instead([INVALID_PARAMS])
    def batch_put_session_start(
        self, keys: Sequence[str], sizes: Numbers, config: ReplicateConfig | None = None
    ) -> list[int]:
        """Reserve room for values, which stay invisible until they are ended.

        Returns:
            For each 0; -200: no room; -600: it has a session here, or no bytes; -705: there is a
            value, or it is being written elsewhere.
        """

        op = "batch_put_session_start"
        wanted: dict[int, int] = {}

        def check(i: int) -> int:
            size = as_natural("sizes", sizes[i])
            self._setup.running().sessions.check_unwritten(keys[i])
            wanted[i] = size
            return 0

        codes = self._batches.each(op, keys, (sizes,), check)

        def start() -> list[int]:
            running, names = self._setup.running(), [keys[i] for i in wanted]
            begun = running.backend.begin_each(op, names, [*wanted.values()], put_options(config))
            return [
                one
                if isinstance(one, int)
                else code_of(op, partial(running.sessions.begin_writing, one))
                for one in begun
            ]

        fill(op, codes, [*wanted], start)
        return codes

    @returns_instead([INVALID_PARAMS])
    def batch_put_from_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Numbers],
        all_sizes: Sequence[Numbers],
        all_dst_offsets: Sequence[Numbers],
    ) -> list[int]:
        """Copy memory into values that are being written.

        Equivalent to::

            for k, r in all ranges r of all keys k:
                part = memory[all_buffer_ptrs[k][r] :][: all_sizes[k][r]]
                value[keys[k]][all_dst_offsets[k][r] :][: all_sizes[k][r]] = part

        Returns:
            For each its bytes; -600: it has no put session, or a range is not in it.
        """

        def write(i: int) -> int:
            writing = self._setup.running().sessions.writing(keys[i])
            return writing.write(
                *self._ranges(all_buffer_ptrs[i], all_sizes[i], all_dst_offsets[i], writes=False)
            )

        columns = (all_buffer_ptrs, all_sizes, all_dst_offsets)
        return self._batches.each("batch_put_from_multi_buffer_ranges", keys, columns, write)

    @returns_instead([INVALID_PARAMS])
    def batch_put_session_end(self, keys: Sequence[str]) -> list[int]:
        """Make values visible. Bytes that were not written are zeros.

        Returns:
            For each 0; -600: it has no put session.
        """
        op = "batch_put_session_end"
        ended: dict[int, WriteSession] = {}

        def end(i: int) -> int:
            ended[i] = self._setup.running().sessions.end_writing(keys[i])
            return 0

        codes = self._batches.each(op, keys, (), end)
        fill(
            op,
            codes,
            [*ended],
            lambda: self._setup.running().backend.commit_each(op, [*ended.values()]),
        )
        return codes

    @returns_instead([INVALID_PARAMS])
    def batch_put_session_revoke(self, keys: Sequence[str]) -> list[int]:
        """Give up values that are being written.

        Returns:
            For each 0; -600: it has no put session.
        """

        def revoke(i: int) -> int:
            return self._setup.running().sessions.end_writing(keys[i]).abort()

        return self._batches.each("batch_put_session_revoke", keys, (), revoke)

    @returns_instead([INVALID_PARAMS])
    def batch_get_session_start(self, keys: Sequence[str]) -> list[int]:
        """Open values to be read. Values in this node's pool stay until the end.

        Earlier get sessions of these keys are ended first.

        Returns:
            For each 0; -704: there is none; -200: too many are open.
        """
        check_list("keys", keys)
        op = "batch_get_session_start"
        codes = [0] * len(keys)

        def start() -> list[int]:
            running = self._setup.running()
            begin = running.sessions.begin_reading
            for key in keys:
                if isinstance(key, str):
                    running.sessions.end_reading(key)
            started: list[int] = []
            for first in range(0, len(keys), _OPENED_AT_ONCE):
                part = keys[first : first + _OPENED_AT_ONCE]
                started += [
                    one if isinstance(one, int) else code_of(op, partial(begin, one))
                    for one in running.backend.open_each(op, part)
                ]
            return started

        fill(op, codes, range(len(keys)), start)
        return codes

    @returns_instead([INVALID_PARAMS])
    def batch_get_into_multi_buffer_ranges(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Numbers],
        all_sizes: Sequence[Numbers],
        all_src_offsets: Sequence[Numbers],
    ) -> list[int]:
        """Copy ranges of open values into memory.

        Equivalent to::

            for k, r in all ranges r of all keys k:
                part = value[keys[k]][all_src_offsets[k][r] :][: all_sizes[k][r]]
                memory[all_buffer_ptrs[k][r] :][: all_sizes[k][r]] = part

        Returns:
            For each its bytes; -600: it has no get session, or a range is not in it; -704: it is
            gone from another host.
        """
        op = "batch_get_into_multi_buffer_ranges"
        columns = (all_buffer_ptrs, all_sizes, all_src_offsets)
        wanted: dict[int, ReadSpec] = {}

        def look_up(i: int) -> int:
            reading = self._setup.running().sessions.reading(keys[i])
            ranges = self._ranges(all_buffer_ptrs[i], all_sizes[i], all_src_offsets[i], writes=True)
            one = ReadSpec(reading, *ranges)
            one.places()  # refuses ranges that are not in the value
            wanted[i] = one
            return 0

        codes = self._batches.each(op, keys, columns, look_up)
        ranges = [*wanted.values()]
        fill(op, codes, [*wanted], lambda: self._setup.running().backend.read_ranges(op, ranges))
        return codes

    @returns_code
    def batch_get_session_end(self, keys: Sequence[str]) -> int:
        """End the get sessions of values, if there are any: 0."""
        check_list("keys", keys)
        for key in keys:
            self._setup.running().sessions.end_reading(key)
        return 0

    def _ranges(
        self, pointers: Numbers, sizes: Numbers, offsets: Numbers, *, writes: bool
    ) -> tuple[list[int], list[Memory]]:
        """Offsets in a value, and the memory."""
        views = self._batches.views(pointers, sizes, writes=writes)
        check_list("offsets", offsets)
        if len(offsets) != len(views):
            raise InvalidArgument(
                f"offsets must be as many as buffer_ptrs, got {len(offsets)} and {len(views)}"
            )
        return [as_natural("offsets", offset) for offset in offsets], views
