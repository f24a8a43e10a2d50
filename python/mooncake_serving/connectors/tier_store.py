"""A store as a tier of an engine: pages by the engine's names, many at once, without exceptions."""

import json
import logging
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mooncake_kernels.buffers import HOST, Buffer
from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import ChecksumError, InvalidArgument
from mooncake_kernels.pool import PutResult, hash_names
from mooncake_serving.store import ABSENT, Store

from .page_watch import PageWatch
from .store_url import open_store

if TYPE_CHECKING:
    from mooncake_serving.store import ClusterStore

log = logging.getLogger("mooncake_serving.connectors")

# What a store, a disk, a directory or another host may raise; all else is an error of the caller.
FAILURES = (OSError, RuntimeError, ValueError)
STORED = {PutResult.STORED, PutResult.EXISTS, PutResult.BEING_WRITTEN}
DAMAGED = -4  # of Store.get_into_each


def namespace_of(engine: str, parts: Mapping[str, Any]) -> str:
    """Name the owner of pages: the engine, and all that distinguishes pages of equal names.

    Args:
        engine: its name; engines never share pages.
        parts: by name; what they are is written by ``str`` where JSON has no form for it.
    """
    return f"{engine} {json.dumps(parts, sort_keys=True, default=str)}"


class TierStore(Closeable):
    """Pages of an engine in the store that a URL names. Thread-safe. A context manager.

    A page is an object of one or many parts of host memory, given by their addresses; its name is
    the engine's own, of which 64 bits become the key. A call takes an array of pages. What the
    store cannot do is reported page by page, and logged once of each kind: a read that fails is a
    miss, and a page that is not stored is computed again.

    Args:
        url: see ``open_store``.
        namespace: see ``namespace_of``.
        verify: share of the reads that compare checksums, see ``Store``.

    Attributes:
        failures: how often each kind of failure occurred.
        is_local: whether a lookup is a matter of microseconds: it asks no other host.

    Raises:
        InvalidArgument, OSError, Unavailable: as ``open_store``.
    """

    def __init__(self, url: str, namespace: str, *, verify: float = 1.0):
        self._store: Store | ClusterStore = open_store(url, namespace=namespace, verify=verify)
        self._cluster: ClusterStore | None = None
        self._own: Store | None = None  # with the pool of this process
        if isinstance(self._store, Store):
            self._own = self._store
        else:
            self._cluster, self._own = self._store, self._store.node.store
        self.is_local = self._cluster is None
        self.failures: Counter[str] = Counter()
        self._lock = threading.Lock()

    def exists_each(self, names: Sequence[str | bytes]) -> np.ndarray:
        """Tell which of n pages are there: ``[n]`` bool. Not a use, and not a promise."""
        try:
            return self._store.exists_each(_keys(names))
        except FAILURES as error:
            self._failed("look up", error)
            return np.zeros(len(names), bool)

    def match_prefix(self, names: Sequence[str | bytes]) -> int:
        """Count the leading pages that are there."""
        try:
            return self._store.match_prefix(_keys(names))
        except FAILURES as error:
            self._failed("look up", error)
            return 0

    def put_each(self, names: Sequence[str | bytes], addresses: Any, sizes: Any) -> np.ndarray:
        """Store n pages, unless they are there; LRU evicts the last of them first.

        Args:
            names: n, in the order of their prompt.
            addresses: ``[n, p]``: the parts of each page, in host memory, in order.
            sizes: ``[n, p]``: their bytes.

        Returns:
            ``[n]`` bool: which are there now, or are being written by another.
        """
        addresses, sizes = _table(addresses, len(names)), _table(sizes, len(names))
        try:
            results = self._put(_keys(names), addresses, sizes)
        except FAILURES as error:
            self._failed("store", error)
            return np.zeros(len(names), bool)
        for result in {*results} - STORED:
            self._note(f"store: {result.name}", "pages are not stored: %s", result.name)
        return np.array([result in STORED for result in results], bool)

    def get_each(self, names: Sequence[str | bytes], addresses: Any, sizes: Any) -> np.ndarray:
        """Copy n pages into host memory.

        Args:
            names: n of them.
            addresses: ``[n, p]``: where the parts of each page go.
            sizes: ``[n, p]``: their bytes.

        Returns:
            ``[n]`` bool: which are there as a whole. The memory of all others is undefined.
        """
        addresses, sizes = _table(addresses, len(names)), _table(sizes, len(names))
        try:
            found = self._get(_keys(names), addresses, sizes)
        except FAILURES as error:
            self._failed("load", error)
            return np.zeros(len(names), bool)
        wanted = sizes.sum(1, dtype=np.int64)
        if (found == DAMAGED).any():
            self._note("load: damaged", "pages were damaged, and removed")
        if ((found >= 0) & (found != wanted)).any():
            self._note("load: size", "pages have other sizes than the engine's own")
        return found == wanted

    def get(self, name: str | bytes) -> bytes | None:
        """Return a copy of a page; None if there is none."""
        try:
            return self._store.get(int(_keys([name])[0]))
        except FAILURES as error:
            self._failed("load", error)
            return None

    def use_each(self, names: Sequence[str | bytes]) -> None:
        """Count a use of n pages that are in the own pool, so that LRU evicts others first."""
        if self._own is None:
            return
        try:
            keys = self._own.keyspace.keys(_keys(names))
            for first, second in keys[::-1].tolist():  # the tail is the least recently used
                if (pinned := self._own.pool.pin((first, second))) is not None:
                    pinned.close()
        except FAILURES as error:
            self._failed("use", error)

    def remove_each(self, names: Sequence[str | bytes]) -> np.ndarray:
        """Remove n pages: ``[n]`` bool, which were there."""
        try:
            return self._store.remove_each(_keys(names))
        except FAILURES as error:
            self._failed("remove", error)
            return np.zeros(len(names), bool)

    def clear(self) -> bool:
        """Remove all pages of the namespace that are in the own pool, or on the disk behind it; of
        a cluster also their copies on other hosts. Returns whether that was done.
        """
        if self._own is None:
            return False
        try:
            keys, _ = self._own.list_objects()
            mine = keys[keys[:, 1] == self._own.keyspace.scope, 0]
            self._store.remove_each(mine)
        except FAILURES as error:
            self._failed("remove", error)
            return False
        return True

    def check_page(self, op: str, num_bytes: int) -> None:
        """Refuse pages that are larger than the own pool.

        Raises:
            InvalidArgument: they are.
        """
        if self._own is not None and num_bytes > (most := self._own.pool.capacity_bytes):
            raise InvalidArgument(
                f"{op}: url must name a store with room for a page's {num_bytes} bytes, got {most}"
            )

    def watch(self) -> PageWatch | None:
        """Watch which pages leave the own pool, or the disk behind it; close it before this. None:
        this process has no pool.
        """
        return None if self._own is None else PageWatch(self._own)

    def used_bytes(self) -> tuple[int, int]:
        """How much of the own pool is used, by anyone, and its size; zeros if there is none."""
        try:
            stats = None if self._own is None else self._own.stats()
        except FAILURES as error:
            self._failed("look at", error)
            stats = None
        if stats is None:
            return 0, 0
        return stats.capacity_bytes - stats.free_bytes, stats.capacity_bytes

    @property
    def closed(self) -> bool:
        return bool(getattr(self._store, "closed", False))

    def close(self) -> None:
        """Close the store; its objects stay, but for those of a pool of this process alone."""
        self._store.close()

    def _put(self, keys: np.ndarray, addresses: np.ndarray, sizes: np.ndarray) -> list[PutResult]:
        if self._cluster is not None:
            return self._cluster.put_from_each(keys.tolist(), _parts(addresses, sizes))
        assert self._own is not None
        words = self._own.keyspace.keys(keys)
        results = self._own.put_headed(words, [b""] * len(words), addresses, sizes)
        self._own.age_tail_first(words[[result is PutResult.STORED for result in results]])
        return results

    def _get(self, keys: np.ndarray, addresses: np.ndarray, sizes: np.ndarray) -> np.ndarray:
        """Sizes of the objects; negative ones as of ``Store.get_into_each``."""
        if sizes.shape[1] == 1:
            buffers = [parts[0] for parts in _parts(addresses, sizes)]
            return self._store.get_into_each(keys, buffers)
        found = np.full(len(keys), ABSENT, np.int64)
        if self._own is not None:
            words = self._own.keyspace.keys(keys)
            no_heads = [b""] * len(words)
            found = self._own.get_headed(words, no_heads, addresses, sizes, free=(0, 0)).copy()
            damaged = words[found == DAMAGED]
            for first, second in damaged.tolist():
                self._own.remove_damaged((first, second))
            if len(damaged) and self._cluster is not None:
                self._cluster.node.entries.withdraw(damaged)
        missing = np.flatnonzero((found == ABSENT) | (found == DAMAGED))
        if len(missing):
            parts = _parts(addresses[missing], sizes[missing])
            read = self._get_elsewhere(keys[missing], parts)
            found[missing] = np.where(read == ABSENT, found[missing], read)
        return found

    def _get_elsewhere(self, keys: np.ndarray, parts: list[list[Buffer]]) -> np.ndarray:
        """Read pages that are not in the own pool: from other hosts, or the disk."""
        found = np.full(len(keys), ABSENT, np.int64)
        if self._cluster is not None:
            return _get_from_others(self._cluster, keys, parts)
        if self._own is None or self._own.is_pool_all:
            return found
        for i in np.flatnonzero(self._own.exists_each(keys)).tolist():
            try:
                size = self._own.get_into(int(keys[i]), *parts[i])
            except ChecksumError:
                size = DAMAGED
            found[i] = ABSENT if size is None else size
        return found

    def _failed(self, what: str, error: Exception) -> None:
        kind = f"{what}: {type(error).__name__}"
        self._note(kind, "the store cannot %s pages: %s", what, error)

    def _note(self, kind: str, message: str, *values: Any) -> None:
        """Count a failure, and log the first of its kind."""
        with self._lock:
            self.failures[kind] += 1
            is_first = self.failures[kind] == 1
        if is_first:
            log.warning(message + "; logged once", *values)


def _get_from_others(
    cluster: "ClusterStore", keys: np.ndarray, parts: list[list[Buffer]]
) -> np.ndarray:
    """Read from other hosts; one request goes to each that has some."""
    from mooncake_serving.store.cluster import BufferDestination, Outcome

    found = np.full(len(keys), ABSENT, np.int64)
    destinations = [BufferDestination("get_into", memory) for memory in parts]
    outcomes = cluster.read_each(cluster.keyspace.keys(keys), destinations)
    for i, (destination, outcome) in enumerate(zip(destinations, outcomes, strict=True)):
        if outcome is Outcome.DONE:
            destination.deliver()
            found[i] = destination.object_bytes
        elif outcome is Outcome.DAMAGED:
            found[i] = DAMAGED
    return found


def _keys(names: Sequence[str | bytes]) -> np.ndarray:
    """``[n]`` uint64: a hash of each name."""
    return np.ascontiguousarray(hash_names(list(names), 0)[:, 0])


def _table(values: Any, num_rows: int) -> np.ndarray:
    """``[n, p]`` uint64, from as many values in one row."""
    table = np.asarray(values, np.uint64)
    return table.reshape(num_rows, -1) if table.size else np.zeros((num_rows, 1), np.uint64)


def _parts(addresses: np.ndarray, sizes: np.ndarray) -> list[list[Buffer]]:
    return [
        [Buffer(*place, HOST, True, None) for place in zip(*row, strict=True)]
        for row in zip(addresses.tolist(), sizes.tolist(), strict=True)
    ]
