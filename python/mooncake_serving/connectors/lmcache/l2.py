"""``StoreL2Adapter``: the store as a second level (L2) of LMCache.

::

    lmcache server --l1-size-gb 16 --l2-adapter '{
        "type": "plugin",
        "module_path": "mooncake_serving.connectors.lmcache.l2",
        "class_name": "StoreL2Adapter",
        "adapter_params": {"url": "shm:/dev/shm/kv?size=64GiB"}}'

LMCache copies between GPUs and its own memory on the host (L1); this copies objects between that
memory and a store, which other servers share. docs/serving/engines.md.
"""

import itertools
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import AdapterUsage, L2AdapterInterface, L2TaskId
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import create_event_notifier

from mooncake_kernels.errors import InvalidArgument, shown

from ..tier_store import TierStore, namespace_of

log = logging.getLogger("mooncake_serving.connectors.lmcache")

OPTIONS = ("url", "namespace", "num_threads")
NUM_THREADS = 2
MAX_THREADS = 64
MAX_FORMS = 16  # that are remembered of a model and group


class StoreL2Adapter(L2AdapterInterface):  # type: ignore[misc]  # LMCache is not there
    """Objects of LMCache in the store that a URL names. Thread-safe. Threads do the work.

    An object's key is LMCache's own, with the shapes and dtypes of its memory, so that objects of
    another form are others. A lookup does not lock: it counts as a use, so that the store evicts
    others first, and an object that is evicted all the same is one that could not be loaded. What
    the store cannot do is a miss, or a store that failed, and logged once of each kind.

    Args:
        config: ``adapter_params`` of LMCache's configuration: ``url``, see ``open_store``;
            ``namespace``: servers with different ones do not share objects; ``num_threads``.
        l1_memory_desc: of LMCache.

    Raises:
        InvalidArgument: a parameter is unknown, missing or wrong.
        OSError, Unavailable: as ``open_store``.
    """

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None):
        super().__init__()  # without a limit: the store makes room by itself
        if unknown := config.keys() - set(OPTIONS):
            known = ", ".join(OPTIONS)
            raise _wrong("adapter_params", f"no others than {known}", ", ".join(sorted(unknown)))
        namespace, num_threads = config.get("namespace", ""), config.get("num_threads", NUM_THREADS)
        if not isinstance(namespace, str):
            raise _wrong("namespace", "a str", shown(namespace))
        is_number = isinstance(num_threads, int) and not isinstance(num_threads, bool)
        if not is_number or not 1 <= num_threads <= MAX_THREADS:
            raise _wrong("num_threads", f"an integer from 1 to {MAX_THREADS}", shown(num_threads))
        self._store = TierStore(
            config.get("url", ""), namespace_of("lmcache", {"namespace": namespace})
        )
        self._stores = _Tasks(lambda _: L2StoreResult(False, 0))
        self._lookups = _Tasks(Bitmap)
        self._loads = _Tasks(Bitmap)
        self._ids = itertools.count()
        # Of objects of a model and group, the last used last; an engine has one.
        self._forms: dict[tuple[str, int], list[str]] = {}
        self._threads = ThreadPoolExecutor(num_threads, "mk-l2")
        self._is_closed = False

    def get_store_event_fd(self) -> int:
        return self._stores.event.fileno()

    def get_lookup_and_lock_event_fd(self) -> int:
        return self._lookups.event.fileno()

    def get_load_event_fd(self) -> int:
        return self._loads.event.fileno()

    def submit_store_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Have a thread store objects."""
        return self._submit(self._stores, self._run_store, keys, objects)

    def pop_completed_store_tasks(self) -> dict[L2TaskId, L2StoreResult]:
        return self._stores.pop_all()

    def submit_lookup_and_lock_task(
        self, keys: list[ObjectKey], group_layout_descs: dict[int, MemoryLayoutDesc]
    ) -> L2TaskId:
        """Have a thread look up objects, and count a use of those that are there."""
        return self._submit(self._lookups, self._run_lookup, keys, group_layout_descs)

    def query_lookup_and_lock_result(self, task_id: L2TaskId) -> Bitmap | None:
        return self._lookups.pop(task_id)

    def submit_unlock(self, keys: list[ObjectKey]) -> None:
        """Do nothing: nothing is locked."""

    def submit_load_task(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2TaskId:
        """Have a thread load objects."""
        return self._submit(self._loads, self._run_load, keys, objects)

    def query_load_result(self, task_id: L2TaskId) -> Bitmap | None:
        return self._loads.pop(task_id)

    def delete(self, keys: list[ObjectKey]) -> None:
        """Remove objects, of the last forms that this server has seen."""
        owners, forms = [], []
        for key in keys:
            seen = self._forms.get((key.model_name, key.object_group_id), [])
            owners += [key] * len(seen)
            forms += seen
        removed = self._store.remove_each(self._names(owners, forms)).tolist()
        gone = [key for key, was_there in zip(owners, removed, strict=True) if was_there]
        if gone := list(dict.fromkeys(gone)):
            self._notify_keys_deleted(gone, [0] * len(gone))

    def get_usage(self) -> AdapterUsage:
        """Tell how much of the pool is used, by all that share it; nothing is known by salt."""
        return AdapterUsage(*self._store.used_bytes())

    def report_status(self) -> dict[str, Any]:
        """Tell how often the store failed, by kind."""
        return {
            "is_healthy": not self._is_closed,
            "type": "StoreL2Adapter",
            "failures": dict(self._store.failures),
        }

    def close(self) -> None:
        """Wait for what is under way, and close the store, whose objects stay. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._threads.shutdown(wait=True)
        self._store.close()
        for tasks in (self._stores, self._lookups, self._loads):
            tasks.event.close()

    def _submit(self, tasks: "_Tasks", run: Callable[..., Any], *arguments: Any) -> L2TaskId:
        task_id = next(self._ids)
        self._threads.submit(tasks.run, task_id, run, *arguments)
        return task_id

    def _run_store(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> L2StoreResult:
        memory = self._memory(keys, objects)
        if memory is None:
            return L2StoreResult(False, 0)
        names, addresses, sizes = memory
        new = ~self._store.exists_each(names)
        stored = self._store.put_each(names, addresses, sizes)
        if news := np.flatnonzero(new & stored).tolist():
            self._notify_keys_stored([keys[i] for i in news], [sizes[i] for i in news])
        return L2StoreResult(bool(stored.all()), sum(sizes[i] for i in news))

    def _run_lookup(self, keys: list[ObjectKey], layouts: Mapping[int, MemoryLayoutDesc]) -> Bitmap:
        names = self._names(keys, [self._form_of(key, layouts) for key in keys])
        found = self._store.exists_each(names)
        self._store.use_each([names[i] for i in np.flatnonzero(found).tolist()])
        return _bitmap(found)

    def _run_load(self, keys: list[ObjectKey], objects: list[MemoryObj]) -> Bitmap:
        memory = self._memory(keys, objects)
        if memory is None:
            return Bitmap(len(keys))
        loaded = self._store.get_each(*memory)
        if there := [keys[i] for i in np.flatnonzero(loaded).tolist()]:
            self._notify_keys_accessed(there)
        return _bitmap(loaded)

    def _memory(
        self, keys: Sequence[ObjectKey], objects: Sequence[MemoryObj]
    ) -> tuple[list[str], list[int], list[int]] | None:
        """Names, addresses and sizes of objects; None if they are not in host memory."""
        forms = [_form_of(one.metadata) for one in objects]
        for key, form in zip(keys, forms, strict=True):
            seen = self._forms.get((key.model_name, key.object_group_id), [])
            if seen[-1:] != [form]:  # a new list: another thread may read the old one
                others = [one for one in seen if one != form]
                self._forms[key.model_name, key.object_group_id] = [*others, form][-MAX_FORMS:]
        try:
            addresses = [one.data_ptr for one in objects]
        except NotImplementedError as error:
            log.error("objects must be in host memory: %s", error)
            return None
        return self._names(keys, forms), addresses, [one.get_size() for one in objects]

    def _form_of(self, key: ObjectKey, layouts: Mapping[int, MemoryLayoutDesc]) -> str:
        """The form that an object must have: what LMCache says, or what the last one had."""
        if (layout := layouts.get(key.object_group_id)) is not None:
            return _form(layout.shapes, layout.dtypes)
        return self._forms.get((key.model_name, key.object_group_id), [""])[-1]

    def _names(self, keys: Sequence[ObjectKey], forms: Sequence[str]) -> list[str]:
        return [
            f"{key.model_name}@{key.kv_rank:x}@{key.object_group_id}@{key.chunk_hash.hex()}"
            f"@{key.cache_salt}@{form}"
            for key, form in zip(keys, forms, strict=True)
        ]


class _Tasks:
    """Tasks of one kind: their results, until they are taken, and an event for each that ends.

    Args:
        none: makes the result of a task that failed, of the number of its objects.
    """

    def __init__(self, none: Callable[[int], Any]) -> None:
        self._none = none
        self.event = create_event_notifier()
        self._results: dict[L2TaskId, Any] = {}
        self._lock = threading.Lock()

    def run(self, task_id: L2TaskId, run: Callable[..., Any], *arguments: Any) -> None:
        """Run a task. LMCache waits for its result: one that raises an error has an empty one."""
        try:
            result = run(*arguments)
        except Exception:
            log.exception("task %d failed", task_id)
            result = self._none(len(arguments[0]))
        with self._lock:
            self._results[task_id] = result
        self.event.notify()

    def pop(self, task_id: L2TaskId) -> Any:
        with self._lock:
            return self._results.pop(task_id, None)

    def pop_all(self) -> dict[L2TaskId, Any]:
        with self._lock:
            results, self._results = self._results, {}
        return results


def _form(shapes: Sequence[Any], dtypes: Sequence[Any]) -> str:
    return ";".join(f"{dtype}{list(shape)}" for shape, dtype in zip(shapes, dtypes, strict=True))


def _form_of(meta: Any) -> str:
    """The form of an object's memory, by its metadata."""
    if meta.shapes is None or meta.dtypes is None:
        return _form([meta.shape], [meta.dtype])
    return _form(meta.shapes, meta.dtypes)


def _bitmap(found: np.ndarray) -> Bitmap:
    bitmap = Bitmap(len(found))
    for i in np.flatnonzero(found).tolist():
        bitmap.set(i)
    return bitmap


def _wrong(argument: str, need: str, value: str) -> InvalidArgument:
    return InvalidArgument(f"StoreL2Adapter: {argument} must be {need}, got {value}")
