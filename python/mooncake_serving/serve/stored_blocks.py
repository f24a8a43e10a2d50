"""A store behind an engine's own cache: blocks that any engine of the model has computed."""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

import mooncake_kernels as mk
from mooncake_kernels.closeable import Closeable
from mooncake_serving.connectors.handoff import strips_of
from mooncake_serving.connectors.tier_store import TierStore, namespace_of
from mooncake_serving.engine import Engine
from mooncake_serving.engine.caching_allocator import (
    CachingAllocator,
    DroppedBlocks,
    KeptBlocks,
)

from .job import Job

logger = logging.getLogger(__name__)

MAX_BYTES = 256 << 20  # of blocks on their way to the store; others are not saved
LATE_S = 0.5  # that a step waits in all: other requests are computed in it, too


@dataclass(frozen=True)
class Loaded:
    """A request whose prompt was looked for in the store, and which may be computed.

    Attributes:
        job: the request.
        block_ids: all of its blocks.
        num_cached_tokens: at its beginning, which have their keys and values, or are getting them:
            see ``before_layers``.
    """

    job: Job
    block_ids: list[int]
    num_cached_tokens: int


class NotLoaded(Exception):
    """Strips have not come that a step needs: ``set_aside`` these requests."""

    def __init__(self, jobs: list[Job]):
        super().__init__(f"{len(jobs)} requests' blocks are not loaded")
        self.jobs = jobs


@dataclass(eq=False)
class _Load:
    """What is loaded for a request.

    Attributes:
        job: the request; None: it has ended.
        block_ids: all of its blocks.
        num_cached_tokens: at their beginning, before.
        names: of the blocks behind those tokens.
        targets: the blocks for them.
        promised: how many of them the request is computed with; None: it is not computed yet.
        waits_for_end: whether it is computed when the load has ended, and not before.
        num_blocks: so many of the names are in the store. Of this and the rest the thread decides.
        num_strips: so many of these blocks' strips are in the cache.
        is_over: whether no more is written.
    """

    job: Job | None
    block_ids: list[int]
    num_cached_tokens: int
    names: list[int]
    targets: list[int]
    promised: int | None = None
    waits_for_end: bool = False
    num_blocks: int = 0
    num_strips: int = 0
    is_over: bool = False

    @property
    def may_run(self) -> bool:
        return self.is_over or (self.num_blocks > 0 and not self.waits_for_end)

    @property
    def is_short(self) -> bool:
        """Whether fewer blocks come than the request is computed with."""
        return self.promised is not None and self.num_blocks < self.promised


@dataclass(frozen=True)
class _Save:
    names: list[int]
    packed: list[torch.Tensor]  # by strip


# What is done first has the lowest number: requests wait for loads. Equals are in order.
_Work: TypeAlias = tuple[int, int, _Load | _Save | None]
LOAD, SAVE, END = range(3)


class StoredBlocks(Closeable):
    """Loads and saves blocks by a thread of its own. All calls are the engine's thread's.

    A block is stored as an object for each strip of layers. A prompt is loaded strip by strip, and
    computed as soon as the first one is there: ``before_layers`` waits for the others. In the end
    all are used once more, so that LRU gives up whole blocks, from the end of the prompt on.

    Loads come before saves, which no one waits for. What fails is a miss, and logged: what stores
    are known to raise once of each kind, see ``TierStore``.

    Args:
        url: of the store, see ``open_store``.
        model: what distinguishes its blocks from those of other models.
        engine: whose blocks they are.

    Raises:
        InvalidArgument, OSError, Unavailable: as ``open_store``; or a block does not fit.
    """

    def __init__(self, url: str, model: str, engine: Engine):
        self._engine, cache = engine, engine.cache
        self._strips = strips_of(cache.num_layers)
        self._views = [cache.view(strip) for strip in self._strips]
        self._shapes = [mk.gather_blocks(view, [0])[0].shape for view in self._views]
        parts = {
            "model": model,
            "block": [str(cache.dtype), self._shapes, self._views[0].packed_axes],
        }
        self._store = TierStore(url, namespace_of("serve", parts))
        self._block_bytes = cache.view().block_bytes
        try:
            self._store.check_page("serve engine: --store", self._block_bytes)
        except BaseException:
            self._store.close()
            raise
        # Names of blocks that the store has, or gets: of kept ones, and of those that were loaded.
        self._known: set[int] = set()
        self._loaded: dict[Job, list[int]] = {}  # names of the latter, until their requests end
        self._loads: dict[Job, _Load] = {}  # that have not ended
        self._state = threading.Condition()  # of what the thread has done
        self._saving_bytes = 0
        self._numbers = itertools.count()
        self._work: queue.PriorityQueue[_Work] = queue.PriorityQueue()
        self._thread = threading.Thread(target=self._run, name="stored blocks", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether ``poll`` may return or free something."""
        return bool(self._loads)

    def load(self, job: Job, block_ids: list[int], num_cached_tokens: int) -> None:
        """Look for a prompt's blocks behind the cached tokens; ``poll`` returns the request.

        Blocks stay allocated while they are written to, whatever becomes of the request.
        """
        size = self._engine.cache.block_size
        first = num_cached_tokens // size
        names = mk.block_hashes(job.prompt[:-1], size)[first:].tolist()
        targets = block_ids[first : first + len(names)]
        self._engine.allocator.share(targets)
        load = _Load(job, block_ids, num_cached_tokens, names, targets)
        self._loads[job] = load
        self._add(LOAD, load)

    def poll(self) -> list[Loaded]:
        """Return the requests that may be computed now: each once, and again if set aside."""
        loaded: list[Loaded] = []
        size = self._engine.cache.block_size
        for load in [*self._loads.values()]:
            with self._state:
                is_over, may_run, num_blocks = load.is_over, load.may_run, load.num_blocks
            if may_run and load.promised is None and load.job is not None:
                load.promised = num_blocks
                self._loaded[load.job] = load.names[:num_blocks]
                self._known.update(load.names[:num_blocks])
                num_cached = load.num_cached_tokens + num_blocks * size
                loaded.append(Loaded(load.job, load.block_ids, num_cached))
            if is_over and not load.is_short:
                self._forget(load)
        return loaded

    def before_layers(self, jobs: Iterable[Job]) -> Callable[[int], None] | None:
        """Return what a step with these requests is to call before each layer's attention: it waits
        until the layer of their blocks is there. None: all of them are.

        It raises ``NotLoaded`` for those that do not come in time.
        """
        loads = [load for load in map(self._loads.get, jobs) if load is not None]
        if not loads:
            return None
        until = time.monotonic() + LATE_S

        def wait(layer_index: int) -> None:
            strip = next(i for i, layers in enumerate(self._strips) if layer_index in layers)

            def is_there(load: _Load) -> bool:
                return load.num_strips > strip and not load.is_short

            def is_settled(load: _Load) -> bool:
                return load.is_over or load.is_short or is_there(load)

            with self._state:
                left = max(0.0, until - time.monotonic())
                self._state.wait_for(lambda: all(map(is_settled, loads)), left)
                missing = [load.job for load in loads if not is_there(load)]
            if missing:
                raise NotLoaded([job for job in missing if job is not None])

        return wait

    def set_aside(self, job: Job) -> list[int]:
        """Have ``poll`` return a request again, when its load has ended.

        Returns:
            Its blocks: the engine must not free them with the request.
        """
        load = self._loads[job]
        load.promised, load.waits_for_end = None, True
        self._known.difference_update(self._loaded.pop(job))
        return load.block_ids

    def ended(self, job: Job) -> None:
        """Forget a request, wherever it was: its blocks are freed, unless ``poll`` has returned
        them; and of blocks that it has loaded, and that were not kept, the names.
        """
        if (load := self._loads.get(job)) is not None:
            if load.promised is None:
                self._engine.allocator.free(load.block_ids)
            load.job = load.promised = None
        allocator = self._engine.allocator
        assert isinstance(allocator, CachingAllocator), "it keeps prefixes"
        for name in self._loaded.pop(job, ()):
            if not allocator.keeps(name):
                self._known.discard(name)

    def _forget(self, load: _Load) -> None:
        """Free the blocks of a load that has ended, if no request holds them."""
        self._engine.allocator.free(load.targets)
        self._loads = {job: other for job, other in self._loads.items() if other is not load}

    def changed(self, change: KeptBlocks | DroppedBlocks) -> None:
        """Save what the engine keeps; what it drops it may compute, and save, again."""
        if isinstance(change, DroppedBlocks):
            self._known.difference_update(change.names)
            return
        new = {
            name: block
            for name, block in zip(change.names, change.block_ids, strict=True)
            if name not in self._known
        }
        num_bytes = len(new) * self._block_bytes
        with self._state:
            if not new or self._saving_bytes + num_bytes > MAX_BYTES:
                return
            self._saving_bytes += num_bytes
        packed = [mk.gather_blocks(view, [*new.values()]).cpu() for view in self._views]
        self._known.update(new)
        self._add(SAVE, _Save([*new], packed))

    def close(self) -> None:
        """Save what is on its way, and close the store. Idempotent."""
        self._add(END, None)
        self._thread.join()
        self._store.close()

    def _add(self, order: int, work: _Load | _Save | None) -> None:
        self._work.put((order, next(self._numbers), work))

    def _run(self) -> None:
        while (work := self._work.get()[-1]) is not None:
            if isinstance(work, _Save):
                self._put(work)
            else:
                self._get(work)

    def _get(self, load: _Load) -> None:
        """Load what is there of the blocks, one behind the other, strip by strip."""
        try:
            self._read(load)
        except Exception:  # as of memory: requests wait for this thread, and may compute it all
            logger.exception("blocks cannot be loaded")
            with self._state:
                load.num_blocks = 0
        with self._state:
            load.is_over = True
            self._state.notify_all()

    def _read(self, load: _Load) -> None:
        every = range(len(self._strips))
        num_blocks = self._store.match_prefix(_names(load.names, every)) // len(every)
        for strip in every:
            if not num_blocks or load.job is None:
                break
            names = _names(load.names[:num_blocks], [strip])
            packed = torch.empty((num_blocks, *self._shapes[strip]), dtype=self._engine.cache.dtype)
            found = self._store.get_each(names, *_places(packed))
            num_blocks = int(np.argmin([*found, False]))
            if num_blocks:
                packed = packed[:num_blocks].to(self._engine.cache.device)
                mk.scatter_blocks(packed, load.targets[:num_blocks], self._views[strip])
            with self._state:
                load.num_blocks, load.num_strips = num_blocks, strip + 1
                self._state.notify_all()
        self._store.use_each(_names(load.names[:num_blocks], every))

    def _put(self, save: _Save) -> None:
        try:
            names = _names(save.names, range(len(save.packed)))
            self._store.put_each(names, *_places(*save.packed))
        except Exception:
            logger.exception("blocks cannot be saved")
        finally:
            with self._state:
                self._saving_bytes -= sum(packed.nbytes for packed in save.packed)


def _names(names: Sequence[int], strips: Sequence[int]) -> list[bytes]:
    """Return the objects' names, the strips of one block side by side."""
    return [name.to_bytes(8, "big") + bytes([strip]) for name in names for strip in strips]


def _places(*packed: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the addresses and sizes of packed blocks, the strips of one side by side."""
    sizes = np.array([strip[0].nbytes for strip in packed], np.uint64)
    begins = np.array([strip.data_ptr() for strip in packed], np.uint64)
    blocks = np.arange(len(packed[0]), dtype=np.uint64)[:, None]
    return (begins + blocks * sizes).reshape(-1, 1), np.tile(sizes, len(packed[0])).reshape(-1, 1)
