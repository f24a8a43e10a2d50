"""A store behind an engine's own cache: blocks that any engine of the model has computed."""

import itertools
import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch

import mooncake_kernels as mk
from mooncake_kernels.closeable import Closeable
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


@dataclass(frozen=True)
class Loaded:
    """A request whose prompt was looked for in the store.

    Attributes:
        job: the request.
        block_ids: all of its blocks.
        num_cached_tokens: at its beginning, which have their keys and values now.
    """

    job: Job
    block_ids: list[int]
    num_cached_tokens: int


@dataclass(frozen=True)
class _Load:
    job: Job
    block_ids: list[int]
    num_cached_tokens: int
    names: list[int]  # of the blocks behind those tokens


@dataclass(frozen=True)
class _Save:
    names: list[int]
    packed: torch.Tensor


# What is done first has the lowest number: requests wait for loads. Equals are in order.
_Work: TypeAlias = tuple[int, int, _Load | _Save | None]
LOAD, SAVE, END = range(3)


class StoredBlocks(Closeable):
    """Loads and saves blocks, by a thread that knows only host memory. The engine's thread has it.

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
        self._engine, self._view = engine, engine.cache.view()
        shape = mk.gather_blocks(self._view, [0])[0].shape
        parts = {
            "model": model,
            "block": [str(engine.cache.dtype), *shape, *self._view.packed_axes],
        }
        self._store = TierStore(url, namespace_of("serve", parts))
        try:
            self._store.check_page("serve engine: --store", self._view.block_bytes)
        except BaseException:
            self._store.close()
            raise
        self._shape = shape
        # Names of blocks that the store has, or gets: of kept ones, and of those that were loaded.
        self._known: set[int] = set()
        self._loaded: dict[Job, list[int]] = {}  # names of the latter, until their requests end
        self._num_loads = 0
        self._saving_bytes = 0
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._work: queue.PriorityQueue[_Work] = queue.PriorityQueue()
        self._done: queue.SimpleQueue[tuple[_Load, int, torch.Tensor]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="stored blocks", daemon=True)
        self._thread.start()

    @property
    def is_busy(self) -> bool:
        """Whether ``poll`` may return something."""
        return self._num_loads > 0

    def load(self, job: Job, block_ids: list[int], num_cached_tokens: int) -> None:
        """Look for a prompt's blocks behind the cached tokens; ``poll`` returns the request."""
        size = self._engine.cache.block_size
        names = mk.block_hashes(job.prompt[:-1], size)[num_cached_tokens // size :]
        self._num_loads += 1
        self._add(LOAD, _Load(job, block_ids, num_cached_tokens, names.tolist()))

    def poll(self) -> list[Loaded]:
        """Write what has come into its blocks, and return the requests."""
        loaded: list[Loaded] = []
        while True:
            try:
                load, count, packed = self._done.get_nowait()
            except queue.Empty:
                return loaded
            self._num_loads -= 1
            size = self._engine.cache.block_size
            if count:
                first = load.num_cached_tokens // size
                blocks = load.block_ids[first : first + count]
                device = self._engine.cache.device
                mk.scatter_blocks(packed[:count].to(device), blocks, self._view)
                self._loaded[load.job] = load.names[:count]
                self._known.update(load.names[:count])
            num_cached = load.num_cached_tokens + count * size
            loaded.append(Loaded(load.job, load.block_ids, num_cached))

    def ended(self, job: Job) -> None:
        """Forget a request; of blocks that it has loaded, and that were not kept, the names."""
        allocator = self._engine.allocator
        assert isinstance(allocator, CachingAllocator), "it keeps prefixes"
        for name in self._loaded.pop(job, ()):
            if not allocator.keeps(name):
                self._known.discard(name)

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
        num_bytes = len(new) * self._view.block_bytes
        with self._lock:
            if not new or self._saving_bytes + num_bytes > MAX_BYTES:
                return
            self._saving_bytes += num_bytes
        packed = mk.gather_blocks(self._view, [*new.values()]).cpu()
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
                self._done.put((work, *self._get(work)))

    def _get(self, load: _Load) -> tuple[int, torch.Tensor]:
        """Return how many of the blocks are there, one behind the other, and these."""
        try:
            return self._read(_names(load.names))
        except Exception:  # as of memory: requests wait for this thread, and may compute it all
            logger.exception("blocks cannot be loaded")
            return 0, torch.empty(0)

    def _read(self, names: list[bytes]) -> tuple[int, torch.Tensor]:
        names = names[: self._store.match_prefix(names)]
        packed = torch.empty((len(names), *self._shape), dtype=self._engine.cache.dtype)
        if not names:
            return 0, packed
        found = self._store.get_each(names, *_places(packed))
        return int(np.argmin([*found, False])), packed

    def _put(self, save: _Save) -> None:
        try:
            self._store.put_each(_names(save.names), *_places(save.packed))
        except Exception:
            logger.exception("blocks cannot be saved")
        finally:
            with self._lock:
                self._saving_bytes -= save.packed.nbytes


def _names(names: Sequence[int]) -> list[bytes]:
    return [name.to_bytes(8, "big") for name in names]


def _places(packed: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Return the addresses and sizes of packed blocks."""
    size = packed[0].nbytes
    addresses = packed.data_ptr() + size * np.arange(len(packed), dtype=np.uint64)
    return addresses[:, None], np.full((len(packed), 1), size, np.uint64)
