"""A worker's side: threads that copy between its caches and the store."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from mooncake_kernels.errors import Unavailable

from ..tier_store import TierStore
from .caches import GroupCaches, StagedBlocks
from .steps import (
    LOAD_TIMES,
    Blocks,
    GroupForm,
    Load,
    Report,
    Save,
    Shards,
    Step,
    Stored,
    object_names,
)

log = logging.getLogger("mooncake_serving.connectors.vllm")

STAGING_BYTES = 32 << 20  # of a thread, or a block's bytes if these are more
RETRY_SECONDS = 10.0  # after the store could not be opened


class _Staging(threading.local):
    """A thread's own staging memory, by group, and its stream on a GPU."""

    groups: list[StagedBlocks] | None = None
    stream: Any = None


class _Pending:
    """A load or a save of which some pieces are not over."""

    def __init__(self, num_pieces: int, num_blocks: int = 0):
        self.num_pieces = num_pieces  # of a save: that are not copied
        self.num_unstored = num_pieces
        self.stored = [0] * num_blocks  # which the store has
        self.usable: int | None = None  # tokens before the first block that did not come
        self.begin = time.monotonic()


class StoreWorker:
    """Loads and saves blocks of a worker's caches, without vLLM. Nothing here waits for the store.

    A thread has staging memory of its own, pinned if the caches are on a GPU, and a stream there.
    A load goes from the store into staging, and from there into the caches; a save first the other
    way, after an event that follows the step. What the store cannot do is a block that did not
    come, or is not saved.

    Args:
        open_store: opens a store, given its namespace; it is closed by ``close_store``.
        close_store: closes it.
        groups: of the engine's cache.
        layers: the names of each group's layers.
        num_blocks: of the engine's cache.
        shards: of a block, by worker.
        num_threads: that load, and that save.
    """

    def __init__(
        self,
        open_store: Callable[[str], TierStore],
        close_store: Callable[[TierStore], None],
        groups: Sequence[GroupForm],
        layers: Sequence[Sequence[str]],
        *,
        num_blocks: int,
        shards: Shards,
        num_threads: int = 2,
    ):
        self._open_store, self._close_store = open_store, close_store
        self._groups, self._layers, self._num_blocks = groups, layers, num_blocks
        self._shards = shards
        self._store: TierStore | None = None
        self._retry_at = 0.0
        self._caches: list[GroupCaches] = []
        self._staging = _Staging()
        self._loaders = ThreadPoolExecutor(num_threads, "mk-load")
        self._savers = ThreadPoolExecutor(num_threads, "mk-save")
        self._lock = threading.Lock()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._report = Report()
        self._counts: dict[str, Any] = {}

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Set the caches of all layers, by name.

        Raises:
            Unavailable: their layout is unknown, or a pipeline stage has no layer of a group.
        """
        for number, names in enumerate(self._layers):
            if not any(name in kv_caches for name in names):
                raise Unavailable(
                    "StoreConnector: each pipeline stage must have layers of each group of caches, "
                    f"got none of group {number} here: {', '.join(names) or 'no layers'}"
                )
        self._caches = [
            GroupCaches([kv_caches[n] for n in names if n in kv_caches], self._num_blocks)
            for names in self._layers
        ]
        sizes = [caches.block_bytes for caches in self._caches]
        log.info("%d layers, blocks of %s bytes", len(kv_caches), sizes)

    def start(self, step: Step) -> None:
        """Begin the loads of a step."""
        if not step.loads:
            return
        store, event = self._opened(step.namespace), self._event()
        for load in step.loads:
            pieces = self._cut(load.blocks)
            pending = _Pending(len(pieces))
            if store is None:
                pending.num_pieces, pending.usable = 1, 0
                self._end_load(load, pending)
                continue
            for piece in pieces:
                self._loaders.submit(self._load, store, step.epoch, load, piece, pending, event)

    def save(self, step: Step) -> None:
        """Begin to save what the step fills, once it has."""
        if (save := step.save) is None:
            return
        store = self._opened(step.namespace) if self._shards.writes else None
        num_blocks = sum(len(blocks.ids) for blocks in save.blocks)
        if store is None:
            pending = _Pending(1, num_blocks)
            self._end_copy(save, pending)
            self._end_save(save, pending, 0, [])
            return
        pieces, event = self._cut(save.blocks), self._event()
        pending, first = _Pending(len(pieces), num_blocks), 0
        for piece in pieces:
            self._savers.submit(self._save, store, step.epoch, save, piece, first, pending, event)
            first += len(piece.ids)

    def get_finished(self) -> tuple[set[str], set[str]]:
        """Return the requests whose load has ended since the last call, and those of them whose
        load failed.
        """
        with self._lock:
            received, self._received = self._received, set()
            failed, self._failed = self._failed, set()
        return received, failed

    def report(self) -> Report | None:
        """Return what the scheduler has to learn; None: nothing."""
        with self._lock:
            report, self._report = self._report, Report()
        return report if report != Report() else None

    def counts(self) -> dict[str, Any]:
        """Return what was counted since the last call, see ``stats``."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts

    def close(self) -> None:
        """Wait for what was begun, and close the store, whose objects stay. Idempotent."""
        self._loaders.shutdown(wait=True, cancel_futures=True)
        self._savers.shutdown(wait=True)
        if self._store is not None:
            self._close_store(self._store)
            self._store = None

    # --- in the threads -------------------------------------------------------------------------

    def _load(
        self, store: TierStore, epoch: bytes, load: Load, blocks: Blocks, pending: Any, event: Any
    ) -> None:
        usable: int | None = blocks.places[0] * self._groups[blocks.group].tokens_per_block
        try:
            staged = self._staged()[blocks.group]
            names = object_names(epoch, blocks.group, blocks.hashes, [self._shards.number])
            came = store.get_each(names, *staged.places(len(names))).tolist()
            with self._stream(event):
                staged.deliver(blocks.ids, came)
            self._count("loaded", blocks.group, sum(came))
            usable = None
            if not all(came):
                place = blocks.places[came.index(False)]
                usable = place * self._groups[blocks.group].tokens_per_block
                missing = len(came) - sum(came)
                log.warning("%d blocks could not be loaded for %s", missing, load.request_id)
        except Exception:
            log.exception("%d blocks could not be loaded", len(blocks.ids))
        if usable is not None:
            with self._lock:
                known = pending.usable
                pending.usable = usable if known is None else min(usable, known)
        self._end_load(load, pending)

    def _end_load(self, load: Load, pending: _Pending) -> None:
        with self._lock:
            pending.num_pieces -= 1
            if pending.num_pieces > 0:
                return
            self._received.add(load.request_id)
            self._add("loads", 1)
            self._add(LOAD_TIMES, [time.monotonic() - pending.begin])
            if pending.usable is not None:
                self._failed.add(load.request_id)
                self._add("failed_loads", 1)
                self._report.usable[load.request_id] = pending.usable

    def _save(
        self,
        store: TierStore,
        epoch: bytes,
        save: Save,
        blocks: Blocks,
        first: int,
        pending: Any,
        event: Any,
    ) -> None:
        copied, there, begin = False, [], time.monotonic()
        try:
            names = object_names(epoch, blocks.group, blocks.hashes, [self._shards.number])
            there = store.exists_each(names).tolist()
            store.use_each([name for name, is_there in zip(names, there, strict=True) if is_there])
            new = [i for i, is_there in enumerate(there) if not is_there]
            if new:
                staged = self._staged()[blocks.group]
                with self._stream(event):
                    staged.fetch([blocks.ids[i] for i in new])
            copied = True
            self._end_copy(save, pending)
            if new:
                stored = store.put_each([names[i] for i in new], *staged.places(len(new)))
                self._count("saved", blocks.group, int(stored.sum()), time.monotonic() - begin)
                for i, is_stored in zip(new, stored.tolist(), strict=True):
                    there[i] = is_stored
        except Exception:
            log.exception("%d blocks could not be saved", len(blocks.ids))
        finally:
            if not copied:
                self._end_copy(save, pending)
            self._end_save(save, pending, first, there)

    def _end_copy(self, save: Save, pending: _Pending) -> None:
        with self._lock:
            pending.num_pieces -= 1
            if pending.num_pieces == 0:
                self._report.copied[save.number] = 1

    def _end_save(self, save: Save, pending: _Pending, first: int, there: Sequence[bool]) -> None:
        if not save.is_reported or not self._shards.writes:
            return
        with self._lock:
            pending.stored[first : first + len(there)] = map(int, there)
            pending.num_unstored -= 1
            if pending.num_unstored == 0:
                self._report.stored[save.number] = Stored(1, pending.stored)

    def _count(self, what: str, group: int, num_blocks: int, seconds: float | None = None) -> None:
        with self._lock:
            self._add(f"{what}_blocks", num_blocks)
            self._add(f"{what}_bytes", num_blocks * self._caches[group].block_bytes)
            if seconds is not None:
                self._add("save_seconds", seconds)

    def _add(self, name: str, value: Any) -> None:
        self._counts[name] = self._counts[name] + value if name in self._counts else value

    def _staged(self) -> list[StagedBlocks]:
        staging = self._staging
        if staging.groups is None:
            device = self._caches[0].device
            num_bytes = max(STAGING_BYTES, *(caches.block_bytes for caches in self._caches))
            if device.type == "cuda":
                torch.cuda.set_device(device)
                staging.stream = torch.cuda.Stream(device)
            memory = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
            staging.groups = [caches.staged(memory) for caches in self._caches]
        return staging.groups

    @contextlib.contextmanager
    def _stream(self, event: Any) -> Iterator[None]:
        """Copy on the thread's own stream, after the event, and wait for the end."""
        stream = self._staging.stream
        if stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            stream.wait_event(event)
            yield
        stream.synchronize()

    # --- in vLLM's own thread -------------------------------------------------------------------

    def _cut(self, blocks: Sequence[Blocks]) -> list[Blocks]:
        """Return pieces that fit into a thread's staging memory."""
        return [
            piece
            for one in blocks
            for piece in one.cut(max(STAGING_BYTES // self._caches[one.group].block_bytes, 1))
        ]

    def _event(self) -> Any:
        """An event after all that vLLM has begun on its stream; None: all of that is over."""
        if not self._caches or self._caches[0].device.type != "cuda":
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._caches[0].device))
        return event

    def _opened(self, namespace: str) -> TierStore | None:
        """The store, opened with the first step that needs it: only the scheduler knows the name.

        Without it an engine goes on.
        """
        if self._store is None and time.monotonic() >= self._retry_at:
            try:
                self._store = self._open_store(namespace)
                largest = max(caches.block_bytes for caches in self._caches)
                self._store.check_page("StoreConnector", largest)
            except (OSError, RuntimeError, ValueError) as error:
                if self._store is not None:
                    self._close_store(self._store)
                    self._store = None
                self._retry_at = time.monotonic() + RETRY_SECONDS
                log.warning("the store could not be opened: %s", error)
        return self._store
