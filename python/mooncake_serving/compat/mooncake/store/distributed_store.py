"""``MooncakeDistributedStore``: Mooncake's store."""

import functools
import os
import re
from collections.abc import Callable, Sequence
from typing import Any, Concatenate

import torch

from mooncake_kernels.buffers import as_buffer, shared_memory
from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural
from ..names import check_text
from .batches import Batches, Numbers, Ranges
from .buffers import BufferHandle, handle_of
from .codes import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    OBJECT_NOT_FOUND,
    TASK_NOT_FOUND,
    Answer,
    Arguments,
    check_list,
    code_of,
    or_else,
    returns_code,
    returns_instead,
    takes_bytes,
)
from .naming import as_text
from .replicas import NO_TASK, QueryTaskResponse, ReplicaDescriptor, TaskId, TaskType
from .replicate_config import ReplicateConfig, put_options
from .session_calls import SessionCalls
from .setup import Running, Setup
from .tensors import Tensors, tensor_call


def _of_sessions(
    method: Callable[Concatenate[SessionCalls, Arguments], Answer],
) -> Callable[Concatenate["MooncakeDistributedStore", Arguments], Answer]:
    """The same method of a store."""

    @functools.wraps(method)
    def call(
        self: "MooncakeDistributedStore", /, *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Answer:
        return method(self._sessions, *args, **kwargs)

    return call


class MooncakeDistributedStore:
    """Mooncake's ``MooncakeDistributedStore``: values by name, shared by processes.

    Thread-safe. Values are in the pool, and stay there when this object, or its process, is gone.

    Calls return Mooncake's codes; the reason of a failure is logged. A batch returns one code per
    key, and continues after a failure.
    """

    def __init__(self) -> None:
        self._setup = Setup()
        self._batches = Batches(self._setup)
        self._sessions = SessionCalls(self._setup, self._batches)
        self._tensors = Tensors(self._setup, self._batches)
        self._allocated: list[torch.Tensor] = []

    def setup(self, *args: Any, **kwargs: Any) -> int:
        """Open the store. A second call has no effect.

        Call it with the arguments of ``Settings``, or with a dict of them, in which numbers may be
        strings.

        Returns:
            0; -600 if an argument is wrong, -1 if it cannot be opened.

        Raises:
            TypeError: an argument is missing, or has a name that is not known, by which engines
                find out what this version supports.
        """
        return self._setup.start("setup", *args, **kwargs)

    def setup_dummy(self, mem_pool_size: int, local_buffer_size: int, server_address: str) -> int:
        """Open an existing store, without a pool of its own: see ``Settings``.

        Args:
            mem_pool_size: ignored: memory of callers is registered in place.
            local_buffer_size: as in ``setup``.
            server_address: as ``master_server_addr`` of ``setup``.

        Returns:
            As ``setup``; -600 if the pool does not exist.
        """
        here = "127.0.0.1", "P2PHANDSHAKE", 0
        return self._setup.start("setup_dummy", *here, local_buffer_size, "tcp", "", server_address)

    def health_check(self) -> int:
        """Return 0 if the store can be used, 1 if it was not set up here, or closed.

        2 if the directory of a store of many hosts does not answer.
        """
        return self._setup.health()

    def get_hostname(self) -> str:
        """Return the name of this process; "" before ``setup``."""
        return self._setup.hostname()

    def close(self) -> int:
        """Leave the store; existing ``BufferHandle``s stay valid. Returns 0.

        In a pool of the host objects stay; those of a process among many hosts go with it.
        """
        self._setup.close()
        return 0

    # Values: anything with a packed buffer. Putting an existing one has no effect: 0.

    @returns_code
    def put(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Store a value: 0; -200 if there is no room, -600 if it is empty."""
        self._running().backend.put(key, [value], put_options(config))
        return 0

    @returns_code
    def put_parts(self, key: str, *parts: Any, config: ReplicateConfig | None = None) -> int:
        """Store parts as one value, in order. No parts at all: 0."""
        return self._put_parts(key, parts, config, replace=False)

    @returns_code
    def put_batch(
        self, keys: Sequence[str], values: Sequence[Any], config: ReplicateConfig | None = None
    ) -> int:
        """Store values, none of which may be empty: 0, or the code of the first that failed, which
        does not keep others from being stored.
        """
        return self._batches.put_batch("put_batch", keys, values, config)

    @returns_code
    def upsert(self, key: str, value: Any, config: ReplicateConfig | None = None) -> int:
        """Store a value, replacing an existing one: 0, -200 or -600.

        For a moment the key has no value, and it stays so if there is no room.
        """
        self._running().backend.replace(key, [value], put_options(config))
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
        return self._batches.put_batch("upsert_batch", keys, values, config, replace=True)

    @returns_instead(b"")
    def get(self, key: str) -> bytes:
        """Return a value; ``b""`` if there is none."""
        found = self._running().backend.view(key)
        return b"" if found is None else bytes(found)

    @returns_instead([b""])
    def get_batch(self, keys: Sequence[str]) -> list[bytes]:
        """Return values, each as ``get`` does."""
        return self._batches.get("get_batch", keys, bytes, b"")

    @returns_instead(None)
    def get_buffer(self, key: str) -> BufferHandle | None:
        """Return a value in place; it stays for as long as the handle lives. None: no value."""
        found = self._running().backend.view(key)
        return None if found is None else handle_of(found)

    @returns_instead([None])
    def batch_get_buffer(self, keys: Sequence[str]) -> list[BufferHandle | None]:
        """Return values, each as ``get_buffer`` does."""
        return self._batches.get("batch_get_buffer", keys, handle_of, None)

    # Keys. ``force`` is ignored: no lease prevents a removal, since current readers keep the value.

    @returns_code
    def is_exist(self, key: str) -> int:
        """Return 1 if there is a value, else 0."""
        return int(self._running().backend.exist([key])[0])

    @returns_instead([INTERNAL_ERROR])
    def batch_is_exist(self, keys: Sequence[str]) -> list[int]:
        """Check many keys, in one look at the store: 1 or 0 each; all -1 on failure."""
        check_list("keys", keys)
        return or_else(
            "batch_is_exist",
            lambda: list(map(int, self._running().backend.exist(keys))),
            lambda: [INTERNAL_ERROR] * len(keys),
        )

    @returns_code
    def get_size(self, key: str) -> int:
        """Return the size of a value in bytes; -704 if there is none."""
        return self._running().backend.num_bytes(key)

    @returns_code
    def remove(self, key: str, force: bool = False) -> int:
        """Remove a value: 0; -704 if there is none."""
        return 0 if self._running().backend.remove(key) else OBJECT_NOT_FOUND

    @returns_instead([INVALID_PARAMS])
    def batch_remove(self, keys: Sequence[str], force: bool = False) -> list[int]:
        """Remove values: for each what ``remove`` returns."""
        check_list("keys", keys)
        return or_else(
            "batch_remove",
            lambda: self._running().backend.remove_each("batch_remove", keys),
            lambda: [INVALID_PARAMS] * len(keys),
        )

    @returns_code
    def remove_by_regex(self, regex_pattern: str, force: bool = False) -> int:
        """Remove values whose key has a match of Python's ``re`` anywhere; returns how many.

        Looks at every object.
        """
        backend = self._running().backend
        try:
            pattern = re.compile(as_text(regex_pattern, 0))
            pattern.search("")  # one of bytes finds nothing in a text
        except (re.error, TypeError) as error:
            raise InvalidArgument(
                f"regex_pattern must be a regular expression ({error}), got {regex_pattern!r:.80}"
            ) from None
        found = (name for name in backend.names() if pattern.search(name))
        return backend.remove_named("remove_by_regex", found)

    @returns_code
    def remove_all(self, force: bool = False) -> int:
        """Remove all values of this tenant; returns how many there were."""
        backend = self._running().backend
        return backend.remove_named("remove_all", backend.names())

    # Values by address, of memory of the host or of a GPU, used directly if it is registered, and
    # otherwise looked up. A GPU copies after everything in torch's current stream.

    @returns_code
    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        """Remember memory that other calls use: 0; -600 if it overlaps registered memory.

        The caller keeps it alive.
        """
        running = self._running()
        memory = running.buffers.register(buffer_ptr, size)
        try:
            running.backend.register(memory)
        except BaseException:
            running.buffers.unregister(buffer_ptr)
            raise
        return 0

    @returns_instead(0)
    def alloc_from_mem_pool(self, size: int) -> int:
        """Return the address of ``size`` zeroed bytes, which stay as long as this object; 0 on
        failure. Register them to use them.
        """
        self._running()
        memory = shared_memory(as_natural("size", size, minimum=1))
        self._allocated.append(memory)
        return memory.data_ptr()

    @returns_code
    def unregister_buffer(self, buffer_ptr: int) -> int:
        """Undo ``register_buffer``: 0; -600 if no registered range begins there."""
        running = self._running()
        running.buffers.unregister(buffer_ptr)
        running.backend.deregister(buffer_ptr)
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
        running.backend.put(key, [view], put_options(config))
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
        running.backend.put(key, views, put_options(config))
        return 0

    @returns_code
    def upsert_from(
        self, key: str, buffer_ptr: int, size: int, config: ReplicateConfig | None = None
    ) -> int:
        """``put_from`` that replaces an existing value, see ``upsert``."""
        running = self._running()
        view = running.buffers.view(buffer_ptr, size, writes=False)
        running.backend.replace(key, [view], put_options(config))
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
        return self._batches.put_from("batch_put_from", keys, buffer_ptrs, sizes, 1, config)

    @returns_instead([INVALID_PARAMS])
    def batch_upsert_from(
        self,
        keys: Sequence[str],
        buffer_ptrs: Numbers,
        sizes: Numbers,
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """``batch_put_from`` that replaces existing values, see ``upsert``."""
        op = "batch_upsert_from"
        return self._batches.put_from(op, keys, buffer_ptrs, sizes, 1, config, replace=True)

    @returns_instead([INVALID_PARAMS])
    def batch_put_from_multi_buffers(
        self,
        keys: Sequence[str],
        all_buffer_ptrs: Sequence[Numbers],
        all_sizes: Sequence[Numbers],
        config: ReplicateConfig | None = None,
    ) -> list[int]:
        """Store values, each from many ranges of memory: 0, -200 or -600 each."""
        op = "batch_put_from_multi_buffers"
        return self._batches.put_from(op, keys, all_buffer_ptrs, all_sizes, 2, config)

    @returns_code
    def get_into(self, key: str, buffer_ptr: int, size: int) -> int:
        """Copy a value into memory, which may be larger.

        Returns:
            The size of the value in bytes; -704 if there is none, -600 if the memory is too small.
        """
        running = self._running()
        return running.backend.get_into(key, [running.buffers.view(buffer_ptr, size, writes=True)])

    @returns_instead([INVALID_PARAMS])
    def batch_get_into(
        self, keys: Sequence[str], buffer_ptrs: Numbers, sizes: Numbers
    ) -> list[int]:
        """Copy values into memory, each as ``get_into`` does."""
        return self._batches.get_into("batch_get_into", keys, buffer_ptrs, sizes, 1)

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
        op = "batch_get_into_multi_buffers"
        return self._batches.get_into(op, keys, all_buffer_ptrs, all_sizes, 2)

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
        offsets = all_dst_offsets, all_src_offsets
        return self._batches.get_into_ranges(buffer_ptrs, all_keys, *offsets, all_sizes)

    # Values that are written or read range by range: see ``SessionCalls``.

    batch_put_session_start = _of_sessions(SessionCalls.batch_put_session_start)
    batch_put_from_multi_buffer_ranges = _of_sessions(
        SessionCalls.batch_put_from_multi_buffer_ranges
    )
    batch_put_session_end = _of_sessions(SessionCalls.batch_put_session_end)
    batch_put_session_revoke = _of_sessions(SessionCalls.batch_put_session_revoke)
    batch_get_session_start = _of_sessions(SessionCalls.batch_get_session_start)
    batch_get_into_multi_buffer_ranges = _of_sessions(
        SessionCalls.batch_get_into_multi_buffer_ranges
    )
    batch_get_session_end = _of_sessions(SessionCalls.batch_get_session_end)

    # Copies. A segment is the pool of a process, with the name that ``get_hostname`` returns there.

    @returns_instead([])
    def get_replica_desc(self, key: str) -> list[ReplicaDescriptor]:
        """Return which processes have a value; ``[]``: none."""
        running = self._running()
        hostname = running.settings.local_hostname
        return running.backend.replicas("get_replica_desc", [key], hostname)[0]

    @returns_instead({})
    def batch_get_replica_desc(self, keys: Sequence[str]) -> dict[str, list[ReplicaDescriptor]]:
        """Return which processes have values, for those that exist."""
        check_list("keys", keys)
        running = self._running()
        hostname = running.settings.local_hostname
        found = running.backend.replicas("batch_get_replica_desc", keys, hostname)
        return {key: one for key, one in zip(keys, found, strict=True) if one}

    @returns_instead([])
    def batch_replica_clear(self, keys: Sequence[str], segment_name: str = "") -> list[str]:
        """Remove values from one segment, or from all; returns the keys of those it had.

        Current readers keep a value. The last copy is removed, too.
        """
        check_list("keys", keys)
        running = self._running()
        hostname = running.settings.local_hostname
        return running.backend.clear("batch_replica_clear", keys, segment_name, hostname)

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
            made[0] = running.tasks.add(kind, op, running.backend.change(key, add, remove))
            return 0

        code = code_of(op, make)
        return made[0], code

    # Segments: only among many hosts, for a pool of one host keeps the size that it was made with.
    # A mounted segment is another pool of this process. Its id is its name in ``get_replica_desc``,
    # ``batch_replica_clear`` and copy tasks.

    def mount_segment(
        self, path: str, size: int, offset: int = 0, protocol: str = "tcp", location: str = ""
    ) -> dict[str, Any]:
        """Replace a file, whose bytes are lost, by a pool, and mount it.

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
            ids.extend(self._running().backend.segments().mount(path, *numbers))
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
            mounted.append(self._running().backend.segments().allocate(num_bytes))
            return 0

        code = code_of("allocate_and_mount_segment", mount)
        return {
            "ret": code,
            "segment_ids": [name for name, _ in mounted],
            "allocated_size": sum(num_bytes for _, num_bytes in mounted),
        }

    @returns_code
    def unmount_segment(self, segment_ids: Sequence[str], grace_period_seconds: int = 0) -> int:
        """Unmount what ``mount_segment`` has mounted. Its values are lost; its file stays.

        Args:
            segment_ids: those that are unknown are skipped.
            grace_period_seconds: that long its values can still be read, but none are added. The
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
        return self._running().backend.segments().unmount(op, segment_ids, grace_s, is_file=is_file)

    # Tensors: see ``tensors.PUTS`` and ``tensors.GETS``.

    put_tensor = tensor_call("put_tensor")
    pub_tensor = tensor_call("pub_tensor")
    upsert_tensor = tensor_call("upsert_tensor")
    upsert_pub_tensor = tensor_call("upsert_pub_tensor")
    batch_put_tensor = tensor_call("batch_put_tensor")
    batch_pub_tensor = tensor_call("batch_pub_tensor")
    batch_upsert_tensor = tensor_call("batch_upsert_tensor")
    batch_upsert_pub_tensor = tensor_call("batch_upsert_pub_tensor")
    put_tensor_from = tensor_call("put_tensor_from")
    upsert_tensor_from = tensor_call("upsert_tensor_from")
    batch_put_tensor_from = tensor_call("batch_put_tensor_from")
    batch_upsert_tensor_from = tensor_call("batch_upsert_tensor_from")
    put_tensor_with_tp = tensor_call("put_tensor_with_tp")
    pub_tensor_with_tp = tensor_call("pub_tensor_with_tp")
    batch_put_tensor_with_tp = tensor_call("batch_put_tensor_with_tp")
    batch_pub_tensor_with_tp = tensor_call("batch_pub_tensor_with_tp")
    put_tensor_with_tp_from = tensor_call("put_tensor_with_tp_from")
    batch_put_tensor_with_tp_from = tensor_call("batch_put_tensor_with_tp_from")
    put_tensor_with_parallelism = tensor_call("put_tensor_with_parallelism")
    batch_put_tensor_with_parallelism = tensor_call("batch_put_tensor_with_parallelism")
    put_tensor_with_parallelism_from = tensor_call("put_tensor_with_parallelism_from")
    batch_put_tensor_with_parallelism_from = tensor_call("batch_put_tensor_with_parallelism_from")
    upsert_tensor_with_parallelism = tensor_call("upsert_tensor_with_parallelism")
    batch_upsert_tensor_with_parallelism = tensor_call("batch_upsert_tensor_with_parallelism")
    upsert_tensor_with_parallelism_from = tensor_call("upsert_tensor_with_parallelism_from")
    batch_upsert_tensor_with_parallelism_from = tensor_call(
        "batch_upsert_tensor_with_parallelism_from"
    )
    get_tensor = tensor_call("get_tensor")
    batch_get_tensor = tensor_call("batch_get_tensor")
    get_tensor_into = tensor_call("get_tensor_into")
    batch_get_tensor_into = tensor_call("batch_get_tensor_into")
    get_tensor_with_tp = tensor_call("get_tensor_with_tp")
    batch_get_tensor_with_tp = tensor_call("batch_get_tensor_with_tp")
    get_tensor_with_tp_into = tensor_call("get_tensor_with_tp_into")
    batch_get_tensor_with_tp_into = tensor_call("batch_get_tensor_with_tp_into")
    get_tensor_with_parallelism = tensor_call("get_tensor_with_parallelism")
    batch_get_tensor_with_parallelism = tensor_call("batch_get_tensor_with_parallelism")
    get_tensor_with_parallelism_into = tensor_call("get_tensor_with_parallelism_into")
    batch_get_tensor_with_parallelism_into = tensor_call("batch_get_tensor_with_parallelism_into")

    @returns_code
    def get_tensor_into_cuda(self, key: str, tensor: torch.Tensor) -> int:
        """Copy a tensor's elements into a packed one of the same dtype and shape, on a GPU, which
        copies after everything in torch's current stream, or in host memory.

        Returns:
            The bytes of the elements; -704 if there is none, -600 if it is of another dtype or
            shape, and then nothing is copied.
        """
        return self._tensors.get_into_tensor("get_tensor_into_cuda", key, tensor)

    @returns_instead([INVALID_PARAMS])
    def batch_get_tensor_into_cuda(
        self, keys: Sequence[str], tensors_list: Sequence[torch.Tensor]
    ) -> list[int]:
        """``get_tensor_into_cuda`` for many, key by key."""
        op, get = "batch_get_tensor_into_cuda", self._tensors.get_into_tensor
        return self._batches.each(
            op, keys, (tensors_list,), lambda i: get(op, keys[i], tensors_list[i])
        )

    @returns_code
    def save_tensor_to_safetensor(
        self, key: str, file_name: str | os.PathLike[str] | None = None
    ) -> int:
        """Write a tensor into a file under the name of its key, and replace the file as a whole.

        Args:
            key: of the tensor.
            file_name: used as it is given; None: the key.

        Returns:
            0; -1100 if there is no such tensor, -600 if the file cannot be written.
        """
        return self._tensors.save(key, file_name)

    @returns_instead(None)
    def load_tensor_from_safetensor(
        self, key: str | None = None, file_name: str | os.PathLike[str] | None = None
    ) -> torch.Tensor | None:
        """Store a tensor of a file, unless the key has a value, and return it.

        Args:
            key: its name in the store and in the file; None: that of the file, and the first
                tensor there, which is also read, with a warning, if there is none of the key.
            file_name: must be given.

        Returns:
            The tensor; None if it cannot be read or stored.
        """
        return self._tensors.load(key, file_name)

    def _running(self) -> Running:
        return self._setup.running()

    def _put_parts(
        self, key: str, parts: Sequence[Any], config: ReplicateConfig | None, *, replace: bool
    ) -> int:
        backend, options = self._running().backend, put_options(config)
        if any(as_buffer(part, argument="parts").num_bytes for part in parts):
            (backend.replace if replace else backend.put)(key, parts, options)
        return 0


def _check_texts(protocol: str, location: str) -> None:
    check_text("protocol", protocol)
    check_text("location", location)
