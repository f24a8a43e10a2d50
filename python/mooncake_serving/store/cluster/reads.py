"""The half of ``ClusterStore`` that finds and reads objects."""

import ctypes
import logging
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_kernels.buffers import as_buffer, copy_to_host
from mooncake_kernels.errors import ChecksumError, InvalidArgument, Unavailable
from mooncake_kernels.pool import PinnedObject, PutResult

from ..checks import as_writable, check_pairs
from ..directory import Holders
from ..keyspace import Keyspace, StoreKey, StoreKeys
from ..store import DAMAGED, Store
from .destinations import (
    BufferDestination,
    BytesDestination,
    Destination,
    Outcome,
    PoolDestination,
    keep_copies,
)
from .hot_keys import HotKeys
from .node import Node

logger = logging.getLogger(__name__)

ABSENT, TOO_SMALL = -1, -2  # of ObjectPool.get_into_each
GONE = (Outcome.ABSENT, Outcome.DAMAGED)
PAUSE_S = 0.001  # between looks while another process of this host brings an object here


class ClusterReader:
    """Looks for objects in this node's pool first, then in all others."""

    node: Node
    _store: Store | None  # the node's
    _keyspace: Keyspace
    _hot: HotKeys | None
    _verify: float
    _wait_s: float

    def get(self, key: StoreKey) -> bytes | None:
        """Return a copy of an object; None if none can be reached.

        Raises:
            ChecksumError: every copy is damaged; the damaged copies were removed.
            Unavailable: it is not here, and the directory does not answer.
        """
        value, is_damaged = self._get_here(key)
        if value is not None:
            return value
        destination = BytesDestination()
        outcome = self._read("get", key, destination, is_damaged)
        return None if outcome is Outcome.ABSENT else destination.value()

    def get_into(self, key: StoreKey, *buffers: Any, offset: int | None = None) -> int | None:
        """Copy an object, or the part of it from ``offset`` on, see ``ObjectPool.get_into``.

        Returns:
            Size of the object; None if none can be reached: the content of the buffers is then
            undefined.

        Raises:
            InvalidArgument: the buffers are too small, or the requested part is not in the object.
            ChecksumError, Unavailable: as in ``get``.
        """
        is_damaged = False
        if self._store is not None:
            try:
                size = self._store.get_into(key, *buffers, offset=offset)
                if size is not None:
                    return size
            except ChecksumError:
                is_damaged = True
                self._withdraw(key)
        destination = BufferDestination("get_into", buffers, offset)
        outcome = self._read("get_into", key, destination, is_damaged)
        if outcome is Outcome.ABSENT:
            return None
        if outcome is Outcome.NOT_TAKEN:
            destination.check("get_into")
        destination.deliver()
        return destination.object_bytes

    def get_each(self, keys: StoreKeys) -> list[bytes | None]:
        """Return copies of many objects, see ``get``; those of one holder are read at once."""
        words = self._keyspace.keys(keys, "get_each")
        here = [self._get_here(key) for key in reversed(list(keys))][::-1]  # as Store.get_each
        found = [value for value, _ in here]
        missing = [i for i, value in enumerate(found) if value is None]
        destinations = [BytesDestination() for _ in missing]
        outcomes = self.read_each(words[missing], destinations)
        for i, destination, outcome in zip(missing, destinations, outcomes, strict=True):
            if outcome is Outcome.DONE:
                found[i] = destination.value()
            elif outcome is Outcome.DAMAGED or here[i][1]:
                raise _damaged("get_each", words[i])
        return found

    def get_into_each(self, keys: StoreKeys, buffers: Sequence[Any]) -> np.ndarray:
        """Copy many objects, each into its buffer; the objects of one holder are read at once.

        Args:
            keys: n of them.
            buffers: n of packed, writable memory, each at least as large as its object. Objects
                from other nodes reach a GPU by way of host memory.

        Returns:
            ``[n]`` int64: sizes of the objects; -1 where none can be reached, -2 where the buffer
            is too small, -4 where every copy is damaged.

        Raises:
            InvalidArgument: an argument is wrong; nothing was read.
            Unavailable: the directory does not answer, and some objects are not here; those that
                are here were copied.
        """
        check_pairs("get_into_each", "buffers", keys, buffers)
        words = self._keyspace.keys(keys, "get_into_each")
        sizes = np.full(len(words), ABSENT, np.int64)
        missing = list(range(len(words)))
        left = words
        if self._store is None:
            buffers = as_writable("get_into_each", buffers)
        else:
            sizes = self._store.get_into_each(keys, buffers)
            self.node.entries.withdraw(words[sizes == DAMAGED])
            missing = np.flatnonzero((sizes == ABSENT) | (sizes == DAMAGED)).tolist()
            left = words[missing]
        destinations = [BufferDestination("get_into_each", [buffers[i]]) for i in missing]
        outcomes = self.read_each(left, destinations)
        for i, destination, outcome in zip(missing, destinations, outcomes, strict=True):
            if outcome is Outcome.DONE:
                destination.deliver()
                sizes[i] = destination.object_bytes
            elif outcome is Outcome.NOT_TAKEN:
                sizes[i] = TOO_SMALL
            elif outcome is Outcome.DAMAGED:
                sizes[i] = DAMAGED
        return sizes

    def view(self, key: StoreKey) -> PinnedObject | None:
        """Return an object in place in this node's pool, into which it is copied first if need be.

        Returns:
            See ``Store.view``; None if none can be reached.

        Raises:
            InvalidArgument: the node has no pool.
            Unavailable: there is no room in the pool, another process brings it and does not
                finish, or the directory does not answer.
            ChecksumError: as in ``get``.
        """
        store = self._own_pool("view")
        until = time.monotonic() + self._wait_s
        words = self._keyspace.row(key, "view")
        was_only_on_disk = False
        while True:
            is_damaged = False
            try:
                if (pinned := store.view(key)) is not None:
                    return pinned
            except ChecksumError:
                is_damaged = True
                self._withdraw(key)
            [result], [outcome] = self._fetch(words)
            if result is None:
                if is_damaged or outcome is Outcome.DAMAGED:
                    raise _damaged("view", words[0])
                return None
            is_only_on_disk = (
                result is PutResult.EXISTS and not store.pool.contains_each(words).any()
            )
            if result in (PutResult.FULL, PutResult.OVER_QUOTA) or (
                is_only_on_disk and was_only_on_disk  # twice: it may just have been evicted
            ):
                raise Unavailable("view: the own pool has no room, and nothing can be evicted")
            if time.monotonic() > until:
                raise Unavailable(f"view: the object is not here after {self._wait_s:g} s")
            if result is not PutResult.STORED:
                time.sleep(PAUSE_S)
            was_only_on_disk = is_only_on_disk

    def fetch(self, keys: StoreKeys) -> list[PutResult | None]:
        """Copy objects from other pools into this node's, and publish them.

        Returns:
            For each key ``STORED``; ``EXISTS``: it was here; ``BEING_WRITTEN``: another process
            brings it; ``FULL``; None: none can be reached, or every copy is damaged.

        Raises:
            InvalidArgument: the node has no pool.
            Unavailable: the directory does not answer, and some objects are not here.
        """
        self._own_pool("fetch")
        return self._fetch(self._keyspace.keys(keys, "fetch"))[0]

    def exists(self, key: StoreKey) -> bool:
        """Tell whether any pool has an object, as far as the directory knows."""
        self._keyspace.key(key, "exists")
        return bool(self.exists_each([key])[0])

    def exists_each(self, keys: StoreKeys) -> np.ndarray:
        """Tell which of n keys any pool has: ``[n]`` bool.

        Raises:
            Unavailable: the directory does not answer, and some objects are not here.
        """
        words = self._keyspace.keys(keys, "exists_each")
        found = self._are_here(words)
        if not found.all():
            pools, _ = self.node.locations.find(words[~found], anew=True)
            found[~found] = [bool(names) for names in pools]
        return found

    def match_prefix(self, keys: StoreKeys) -> int:
        """Count the leading keys that any pool has, up to the first that none has.

        One round trip, unless this node's pool has some that the directory does not know. The
        locations are remembered: a read that follows does not ask again.

        Raises:
            Unavailable: the directory does not answer, and some objects are not here.
        """
        words = self._keyspace.keys(keys, "match_prefix")
        count = 0
        while count < len(words):
            here = 0 if self._store is None else self._store.match_keys(words[count:])
            if here == 0 and count > 0:
                break  # where the directory stopped, too
            count += here
            pools = self.node.entries.match_prefix(words[count:])
            if not pools:
                break
            self.node.locations.remember(words[count : count + len(pools)], pools)
            count += len(pools)
        return count

    def _own_pool(self, op: str) -> Store:
        if self._store is None:
            raise InvalidArgument(f"{op}: node must have a pool, got {self.node.name} without")
        return self._store

    def _are_here(self, words: np.ndarray) -> np.ndarray:
        if self._store is None:
            return np.zeros(len(words), bool)
        return self._store.has_keys(words)

    def _get_here(self, key: StoreKey) -> tuple[bytes | None, bool]:
        """Return the local object, and whether it was damaged and is now removed."""
        try:
            return None if self._store is None else self._store.get(key), False
        except ChecksumError:
            self._withdraw(key)
            return None, True

    def _withdraw(self, key: StoreKey) -> None:
        """Tell the directory that the local object is gone because it was damaged."""
        self.node.entries.withdraw(self._keyspace.row(key))

    def _read(self, op: str, key: StoreKey, destination: Destination, is_damaged: bool) -> Outcome:
        """Read one object: ``DONE``, ``NOT_TAKEN`` by its destination, ``ABSENT``."""
        words = self._keyspace.row(key, op)
        [outcome] = self.read_each(words, [destination])
        if outcome is Outcome.DAMAGED or (is_damaged and outcome is Outcome.ABSENT):
            raise _damaged(op, words[0])
        return outcome

    def read_each(self, words: np.ndarray, destinations: Sequence[Destination]) -> list[Outcome]:
        """Read objects of other pools; those that are read repeatedly are copied here.

        Args:
            words: ``[n, 2]`` keys of pools, of objects that are not in this node's.
            destinations: n destinations; the caller calls ``deliver``.

        Returns:
            For each: ``DONE``; ``NOT_TAKEN`` by its destination; ``DAMAGED``: every copy is;
            ``ABSENT``.

        Raises:
            Unavailable: the directory does not answer.
        """
        if not len(words):
            return []
        verify = self._verifies()
        self.node.check_process()
        are_read = self.node.fast_path.read(words, destinations, verify=verify)
        if are_read is None:
            return self._find_and_read(words, destinations, verify=verify)
        outcomes = [Outcome.DONE] * len(destinations)
        if not all(are_read):
            left = [i for i, is_read in enumerate(are_read) if not is_read]
            others = self._find_and_read(
                words[left], [destinations[i] for i in left], verify=verify
            )
            for i, outcome in zip(left, others, strict=True):
                outcomes[i] = outcome
        if self._hot is not None:
            self._count_reads(words[are_read], np.ones(sum(are_read), np.int64))
        return outcomes

    def _find_and_read(
        self, words: np.ndarray, destinations: Sequence[Destination], *, verify: bool
    ) -> list[Outcome]:
        """``read_each``, from whatever pools have them."""
        pools, is_remembered = self.node.locations.find(words)
        outcomes = self._read_from(words, destinations, pools, is_remembered, verify=verify)
        if self._hot is not None:
            read = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.DONE]
            self._count_reads(words[read], np.array([len(pools[i]) for i in read]))
        return outcomes

    def _count_reads(self, words: np.ndarray, num_copies: np.ndarray) -> None:
        """Copy here what is read repeatedly from elsewhere."""
        if self._hot is None or self._store is None or self.node.is_draining:
            return
        if (chosen := self._hot.read(words, num_copies)).any():
            self._fetch_hot(words[chosen])

    def _read_from(
        self,
        words: np.ndarray,
        destinations: Sequence[Destination],
        pools: Holders,
        is_remembered: Sequence[bool],
        *,
        verify: bool,
    ) -> list[Outcome]:
        """Read objects from their remembered locations. For those that are missing or damaged
        there, ask the directory again: they may have been moved meanwhile, also to this node.
        """
        outcomes = self.node.read(words, destinations, pools, verify=verify)
        gone = [i for i, outcome in enumerate(outcomes) if pools[i] and outcome in GONE]
        if not gone:
            return outcomes
        told, _ = self.node.locations.find(words[gone], anew=True)
        elsewhere = {
            i: names
            for i, names in zip(gone, told, strict=True)
            if is_remembered[i] or not set(names) <= set(pools[i])
        }
        indices = list(elsewhere)
        read = self.node.read(
            words[indices],
            [destinations[i] for i in indices],
            list(elsewhere.values()),
            verify=verify,
        )
        for i, outcome in zip(indices, read, strict=True):
            if outcome is not Outcome.ABSENT:
                outcomes[i] = outcome
        for i, names in zip(gone, told, strict=True):
            if outcomes[i] is Outcome.ABSENT and self.node.pool_name in names:
                outcomes[i] = self._read_here(words[i], destinations[i], verify=verify)
        return outcomes

    def _read_here(self, word: np.ndarray, destination: Destination, *, verify: bool) -> Outcome:
        """Read an object that has entered this node's pool since the pool was checked."""
        first, second = word.tolist()
        try:
            pinned = self._own_pool("get").pin_key((first, second))
            if pinned is None:
                return Outcome.ABSENT
            with pinned:
                if verify:
                    pinned.verify()
                ranges = destination.open(pinned.num_bytes)
                if ranges is None:
                    return Outcome.NOT_TAKEN
                source = pinned.buffer
                if not source.is_host:
                    source = as_buffer(copy_to_host([source]))
                for part in ranges:
                    ctypes.memmove(part.address, source.address + part.offset, part.num_bytes)
        except ChecksumError:
            return Outcome.DAMAGED
        destination.commit()
        return Outcome.DONE

    def _fetch_hot(self, words: np.ndarray) -> None:
        try:
            self._fetch(words)
        except Unavailable as error:  # the requested objects have been read
            logger.info("hot objects are not copied here: %s", error)

    def _verifies(self) -> bool:
        return self._verify > 0 and random.random() < self._verify

    def _fetch(self, words: np.ndarray) -> tuple[list[PutResult | None], list[Outcome]]:
        store = self._own_pool("fetch")
        results: list[PutResult | None] = [PutResult.EXISTS] * len(words)
        outcomes = [Outcome.DONE] * len(words)
        missing = np.flatnonzero(~self._are_here(words))
        copies = self.node.entries.copies
        destinations = [
            PoolDestination(store, tuple(word), copies) for word in words[missing].tolist()
        ]
        pools, is_remembered = self.node.locations.find(words[missing], anew=True)
        verify = self._verifies()
        read = self._read_from(words[missing], destinations, pools, is_remembered, verify=verify)
        for gone in keep_copies(store, self.node.entries, words[missing], destinations):
            read[gone] = Outcome.ABSENT
        for i, destination, outcome in zip(missing, destinations, read, strict=True):
            results[i], outcomes[i] = destination.result, outcome
        return results, outcomes


def _damaged(op: str, key: np.ndarray) -> ChecksumError:
    return ChecksumError(f"{op}: object {tuple(key.tolist())} is damaged wherever it is")
