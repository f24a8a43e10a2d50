"""The calls of ``MooncakeDistributedStore`` that mount and unmount segments."""

from collections.abc import Sequence
from typing import Any

from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural
from ..names import check_text
from .codes import check_list, code_of, returns_code
from .lifecycle import Lifecycle


class SegmentCalls(Lifecycle):
    """Only among many hosts: a pool of one host keeps the size that it was made with.

    A mounted segment is a pool of this process beside that of ``setup``. Its id is its name in
    ``get_replica_desc``, ``batch_replica_clear`` and copy tasks.
    """

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Put a pool in the place of a file, whose bytes are lost, and mount it.

        Args:
            path: of a file of at least ``size`` bytes; in memory, such as in /dev/shm.
            size: bytes for objects.
            offset: must be 0.
            protocol: ignored: others reach it as they reach this process.
            location: ignored.

        Returns:
            ``{"ret": 0, "segment_ids": [...]}``; a code, and [].
        """
        ids: list[str] = []

        def mount() -> int:
            _check_texts(protocol, location)
            numbers = as_natural("size", size), as_natural("offset", offset)
            ids.extend(self._running().objects.segments().mount(path, *numbers))
            return 0

        code = code_of("mount_segment", mount)
        return {"ret": code, "segment_ids": ids}

    def allocate_and_mount_segment(
        self, size: int, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Allocate a pool of ``size`` bytes, and mount it.

        Returns:
            ``{"ret": 0, "segment_ids": [...], "allocated_size": ...}``; a code, [] and 0.
        """
        mounted: list[tuple[str, int]] = []

        def mount() -> int:
            _check_texts(protocol, location)
            num_bytes = as_natural("size", size)
            mounted.append(self._running().objects.segments().allocate(num_bytes))
            return 0

        code = code_of("allocate_and_mount_segment", mount)
        return {
            "ret": code,
            "segment_ids": [name for name, _ in mounted],
            "allocated_size": sum(num_bytes for _, num_bytes in mounted),
        }

    @returns_code
    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Unmount what ``mount_segment`` has mounted. Its values are gone; its file stays.

        Args:
            segment_ids: those that are unknown are skipped.
            grace_period_seconds: for so long its values can still be read, but none are added. The
                call does not wait.

        Returns:
            0; -1 if one is unknown, -600 if one is being unmounted.
        """
        return self._unmount("unmount_segment", segment_ids, grace_period_seconds, is_file=True)

    @returns_code
    def unmount_and_free_segment(
        self, segment_ids: Sequence[str], grace_period_seconds: int = 0
    ) -> int:
        """Unmount what ``allocate_and_mount_segment`` has mounted, as ``unmount_segment`` does."""
        op = "unmount_and_free_segment"
        return self._unmount(op, segment_ids, grace_period_seconds, is_file=False)

    @returns_code
    def unmount_local_disk_segment(self, grace_period_seconds: int = 0) -> int:
        """Return 0: there is no SSD; -600 if there is one, which stays until ``close``."""
        as_natural("grace_period_seconds", grace_period_seconds)
        if self._running().settings.enable_ssd_offload:
            raise InvalidArgument("the SSD stays until close, which leaves its values in its file")
        return 0

    def _unmount(
        self, op: str, segment_ids: Sequence[str], grace_period_seconds: int, *, is_file: bool
    ) -> int:
        check_list("segment_ids", segment_ids)
        grace_s = as_natural("grace_period_seconds", grace_period_seconds)
        return self._running().objects.segments().unmount(op, segment_ids, grace_s, is_file=is_file)


def _check_texts(protocol: str, location: str) -> None:
    check_text("protocol", protocol)
    check_text("location", location)
