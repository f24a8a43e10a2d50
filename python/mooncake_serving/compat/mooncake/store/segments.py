"""Pools that a process adds to the store of many hosts while it runs, and takes out again."""

import contextlib
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import ObjectPool
from mooncake_kernels.pool.values import as_path
from mooncake_serving.store import Node, Store
from mooncake_serving.store.directory import Directory

from ..codes import Failed
from ..names import listen_name
from .codes import INTERNAL_ERROR, code_of
from .pools import join, new_pool
from .replicas import check_segment
from .settings import Settings

_UNIT = 16 << 20  # of memory, as in Mooncake


@dataclass
class _Segment:
    node: Node
    opened: ExitStack  # closes the node, and what is under it
    is_file: bool
    timer: threading.Timer | None = None  # unmounts it at the end of its grace period

    def close(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
        self.opened.close()


class Segments:
    """The segments that a process has mounted: members of the directory with a pool and an engine
    of their own, whose name is the segment's id. Thread-safe.

    Args:
        settings: of the process.
        directory: of its node.
        node: of the process, which puts into segments and reads from them like all others.
    """

    def __init__(self, settings: Settings, directory: Directory, node: Node):
        host = listen_name(settings.local_hostname).rpartition(":")[0]
        self._settings = replace(settings, local_hostname=host)  # each listens on a port of its own
        self._directory = directory
        self._node = node
        self._lock = threading.Lock()  # mounting and unmounting, one at a time
        self._mounted: dict[str, _Segment] = {}
        self._is_closed = False
        self._pid = os.getpid()

    def allocate(self, num_bytes: int) -> tuple[str, int]:
        """Mount new memory; returns its id, and for how many bytes of objects it is.

        Raises:
            Failed, InvalidArgument, OSError: the size is 0, or more than there can be.
            Unavailable: the directory does not answer.
        """
        if num_bytes == 0:
            raise Failed(INTERNAL_ERROR, "size must be above 0, got 0")
        whole = -(-num_bytes // _UNIT) * _UNIT
        return self._mount(partial(new_pool, whole, None), is_file=False), whole

    def mount(self, path: str, num_bytes: int, offset: int) -> list[str]:
        """Mount a pool that replaces a file, whose bytes are lost; returns its id; [] for a size
        of 0.

        Raises:
            Failed, InvalidArgument, OSError: the file is not there, not accessible or too small, or
                the offset is not 0.
            Unavailable: the directory does not answer.
        """
        file = os.path.realpath(as_path("mount_segment", path))
        with open(file, "r+b") as opened:
            file_bytes = os.fstat(opened.fileno()).st_size
        if offset + num_bytes > file_bytes or offset % mmap.PAGESIZE:
            raise Failed(
                INTERNAL_ERROR,
                f"offset and size must be whole pages, and bytes within the {file_bytes} of {path},"
                f" got {offset} and {num_bytes}",
            )
        if offset:
            raise InvalidArgument(f"offset must be 0, a pool has its file for itself, got {offset}")
        if num_bytes == 0:
            return []
        make_pool = partial(_pool_in_place_of, file, num_bytes, file_bytes)
        return [self._mount(make_pool, is_file=True)]

    def unmount(self, op: str, names: Sequence[str], grace_s: int, *, is_file: bool) -> int:
        """Unmount segments that are files, or those that are not: 0, or the code of the first that
        failed. The others are unmounted nevertheless.

        A segment leaves with its objects: now, or after a grace period in which they can be read,
        but none are added.
        """
        codes = [code_of(op, partial(self._unmount, name, grace_s, is_file)) for name in names]
        return next(filter(None, codes), 0)

    def close(self) -> None:
        """Unmount all, and wait for no grace period. Idempotent. In a forked child it has no
        effect.
        """
        if os.getpid() != self._pid:
            return
        with self._lock, ExitStack() as closing:
            self._is_closed = True
            for segment in self._mounted.values():
                closing.callback(segment.close)
            closing.callback(self._mounted.clear)

    def _mount(self, make_pool: Callable[[], ObjectPool], *, is_file: bool) -> str:
        with self._lock:
            if self._is_closed:
                raise InvalidArgument("the store is closed")
            opened = ExitStack()
            try:
                store = Store(make_pool(), namespace=self._settings.namespace)
                opened.enter_context(store)
                node = join(self._settings, store, self._directory, opened)
                self._look()
                self._mounted[node.name] = _Segment(node, opened, is_file)
                return node.name
            except BaseException:
                opened.close()
                raise

    def _unmount(self, name: Any, grace_s: int, is_file: bool) -> int:
        check_segment(name)
        with self._lock:
            segment = self._mounted.get(name)
            if segment is None or segment.is_file != is_file:
                known = [key for key, one in self._mounted.items() if one.is_file == is_file]
                raise Failed(INTERNAL_ERROR, f"segment_ids must be of {known}, got {name!r:.80}")
            if segment.timer is not None:
                raise InvalidArgument(f"segment_ids must not be in a grace period, got {name!r}")
            if grace_s == 0:
                self._take_out(name, segment)
                return 0
            after = min(float(grace_s), threading.TIMEOUT_MAX)
            timer = threading.Timer(after, self._end_grace, (name, segment))
            timer.name, timer.daemon = "mk-compat-unmount", True
            timer.start()
            segment.timer = timer
            with contextlib.suppress(Unavailable):  # then the directory learns of it later
                segment.node.set_draining(True)
            self._look()
            return 0

    def _end_grace(self, name: str, segment: _Segment) -> None:
        with self._lock:
            if self._mounted.get(name) is segment:  # and has not been closed meanwhile
                self._take_out(name, segment)

    def _take_out(self, name: str, segment: _Segment) -> None:
        segment.close()
        del self._mounted[name]
        self._look()

    def _look(self) -> None:
        """Have this process know of a change at once; others will within some seconds."""
        with contextlib.suppress(Unavailable):
            self._node.members(anew=True)


def _pool_in_place_of(file: str, num_bytes: int, file_bytes: int) -> ObjectPool:
    """Make a pool, and replace a file by it. Processes that have the file open keep the old one."""
    with tempfile.TemporaryDirectory(prefix=".mooncake-", dir=os.path.dirname(file)) as folder:
        made = f"{folder}/pool"
        with new_pool(num_bytes, made):
            if os.path.getsize(made) < file_bytes:  # it can be mounted again, with all its bytes
                os.truncate(made, file_bytes)
            os.replace(made, file)
            return ObjectPool.open(file)
