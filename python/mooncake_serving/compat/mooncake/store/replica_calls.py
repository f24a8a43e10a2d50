"""The calls of ``MooncakeDistributedStore`` about the copies of a value, and their locations."""

from collections.abc import Sequence

from ..codes import as_natural
from .codes import (
    TASK_NOT_FOUND,
    check_list,
    code_of,
    returns_instead,
    takes_bytes,
)
from .lifecycle import Lifecycle
from .replicas import ReplicaDescriptor
from .tasks import NO_TASK, QueryTaskResponse, TaskId, TaskType


class ReplicaCalls(Lifecycle):
    """A segment is the pool of a process, with the name that ``get_hostname`` returns there."""

    @returns_instead([])
    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Return which processes have a value; ``[]``: none."""
        running = self._running()
        hostname = running.settings.local_hostname
        return running.objects.replicas("get_replica_desc", [key], hostname)[0]

    @returns_instead({})
    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Return which processes have values, for those that exist."""
        check_list("keys", keys)
        running = self._running()
        hostname = running.settings.local_hostname
        found = running.objects.replicas("batch_get_replica_desc", keys, hostname)
        return {key: one for key, one in zip(keys, found, strict=True) if one}

    @returns_instead([])
    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove values from one segment, or from all; returns the keys of those it had.

        Current readers keep a value. The last copy is removed, too.
        """
        check_list("keys", keys)
        running = self._running()
        hostname = running.settings.local_hostname
        return running.objects.clear("batch_replica_clear", keys, segment_name, hostname)

    @takes_bytes
    def create_copy_task(self, key: str, targets: Sequence[str]) -> tuple[TaskId, int]:
        """Copy a value into segments, in the background.

        Returns:
            A number for ``query_task``, and 0; ``(0, 0)`` and -600, -704 or -900.
        """
        return self._task(TaskType.REPLICA_COPY, "create_copy_task", key, targets, ())

    @takes_bytes
    def create_move_task(self, key: str, source: str, target: str) -> tuple[TaskId, int]:
        """Copy a value into one segment, and then remove it from another.

        Returns:
            As ``create_copy_task``.
        """
        return self._task(TaskType.REPLICA_MOVE, "create_move_task", key, [target], [source])

    def query_task(self, task_id: TaskId) -> tuple[QueryTaskResponse | None, int]:
        """Return the progress of a task: what is known of it, and 0; None, and -1400 or -600."""
        found: list[QueryTaskResponse] = []

        def look() -> int:
            check_list("task_id", task_id)
            number = tuple(as_natural("task_id", part) for part in task_id)
            known = self._running().tasks.find(number)
            if known is None:
                return TASK_NOT_FOUND
            found.append(known)
            return 0

        code = code_of("query_task", look)
        return (found[0] if found else None), code

    def _task(
        self, kind: TaskType, op: str, key: str, add: Sequence[str], remove: Sequence[str]
    ) -> tuple[TaskId, int]:
        made = [NO_TASK]

        def make() -> int:
            running = self._running()
            check_list("targets", add)
            made[0] = running.tasks.add(kind, op, running.objects.change(key, add, remove))
            return 0

        code = code_of(op, make)
        return made[0], code
