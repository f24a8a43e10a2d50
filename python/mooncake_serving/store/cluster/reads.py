"""How a node finds and reads objects of other pools."""

import ctypes
import logging
import random
from collections.abc import Sequence

import numpy as np

from mooncake_kernels.buffers import as_buffer, copy_to_host
from mooncake_kernels.errors import ChecksumError, Unavailable
from mooncake_kernels.pool import PutResult

from ..directory import Holders
from .destinations import Destination, Outcome, PoolDestination, keep_copies
from .hot_keys import HotKeys
from .node import Node

logger = logging.getLogger(__name__)

GONE = (Outcome.ABSENT, Outcome.DAMAGED)


class Reads:
    """Reads of a ``ClusterStore``, of keys of pools. Thread-safe.

    Args:
        node: of this process.
        verify: the share of reads whose checksums are compared, 0 to 1.
        hot: chooses which objects are copied into this node's pool; None: none.
    """

    def __init__(self, node: Node, verify: float, hot: HotKeys | None):
        self._node = node
        self._store = node.store
        self._verify = verify
        self._hot = hot

    def are_here(self, words: np.ndarray) -> np.ndarray:
        """``[n]`` bool: which of ``[n, 2]`` objects this node's pool has, or the disk behind it."""
        if self._store is None:
            return np.zeros(len(words), bool)
        return self._store.has_keys(words)

    def exist(self, words: np.ndarray) -> np.ndarray:
        """Which of ``[n, 2]`` objects any pool has, as far as the directory knows: ``[n]`` bool.

        Raises:
            Unavailable: the directory does not answer, and some objects are not here.
        """
        found = self.are_here(words)
        if not found.all():
            pools, _ = self._node.locations.find(words[~found], anew=True)
            found[~found] = [bool(names) for names in pools]
        return found

    def match_prefix(self, words: np.ndarray) -> int:
        """Count the leading ``[n, 2]`` keys that any pool has, up to the first that none has.

        Raises:
            Unavailable: the directory does not answer, and some objects are not here.
        """
        count = 0
        while count < len(words):
            here = 0 if self._store is None else self._store.match_keys(words[count:])
            if here == 0 and count > 0:
                break  # where the directory stopped, too
            count += here
            pools = self._node.entries.match_prefix(words[count:])
            if not pools:
                break
            self._node.locations.remember(words[count : count + len(pools)], pools)
            count += len(pools)
        return count

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
        self._node.check_process()
        are_read = self._node.fast_path.read(words, destinations, verify=verify)
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

    def fetch(self, words: np.ndarray) -> tuple[list[PutResult | None], list[Outcome]]:
        """Copy objects from other pools into this node's, which it must have, and publish them.

        Returns:
            For each ``[n, 2]`` key the result, see ``ClusterStore.fetch``, and that of its read.

        Raises:
            Unavailable: the directory does not answer, and some objects are not here.
        """
        store = self._store
        assert store is not None
        results: list[PutResult | None] = [PutResult.EXISTS] * len(words)
        outcomes = [Outcome.DONE] * len(words)
        missing = np.flatnonzero(~self.are_here(words))
        copies = self._node.entries.copies
        destinations = [
            PoolDestination(store, tuple(word), copies) for word in words[missing].tolist()
        ]
        pools, is_remembered = self._node.locations.find(words[missing], anew=True)
        verify = self._verifies()
        read = self._read_from(words[missing], destinations, pools, is_remembered, verify=verify)
        for gone in keep_copies(store, self._node.entries, words[missing], destinations):
            read[gone] = Outcome.ABSENT
        for i, destination, outcome in zip(missing, destinations, read, strict=True):
            results[i], outcomes[i] = destination.result, outcome
        return results, outcomes

    def _find_and_read(
        self, words: np.ndarray, destinations: Sequence[Destination], *, verify: bool
    ) -> list[Outcome]:
        """``read_each``, from whatever pools have them."""
        pools, is_remembered = self._node.locations.find(words)
        outcomes = self._read_from(words, destinations, pools, is_remembered, verify=verify)
        if self._hot is not None:
            read = [i for i, outcome in enumerate(outcomes) if outcome is Outcome.DONE]
            self._count_reads(words[read], np.array([len(pools[i]) for i in read]))
        return outcomes

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
        outcomes = self._node.read(words, destinations, pools, verify=verify)
        gone = [i for i, outcome in enumerate(outcomes) if pools[i] and outcome in GONE]
        if not gone:
            return outcomes
        found, _ = self._node.locations.find(words[gone], anew=True)
        elsewhere = {
            i: names
            for i, names in zip(gone, found, strict=True)
            if is_remembered[i] or not set(names) <= set(pools[i])
        }
        indices = list(elsewhere)
        read = self._node.read(
            words[indices],
            [destinations[i] for i in indices],
            list(elsewhere.values()),
            verify=verify,
        )
        for i, outcome in zip(indices, read, strict=True):
            if outcome is not Outcome.ABSENT:
                outcomes[i] = outcome
        for i, names in zip(gone, found, strict=True):
            if outcomes[i] is Outcome.ABSENT and self._node.pool_name in names:
                outcomes[i] = self._read_here(words[i], destinations[i], verify=verify)
        return outcomes

    def _read_here(self, word: np.ndarray, destination: Destination, *, verify: bool) -> Outcome:
        """Read an object that has entered this node's pool since the pool was checked."""
        first, second = word.tolist()
        try:
            assert self._store is not None
            pinned = self._store.pin_key((first, second))
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

    def _count_reads(self, words: np.ndarray, num_copies: np.ndarray) -> None:
        """Copy here what is read repeatedly from elsewhere."""
        if self._hot is None or self._store is None or self._node.is_draining:
            return
        if (chosen := self._hot.read(words, num_copies)).any():
            self._fetch_hot(words[chosen])

    def _fetch_hot(self, words: np.ndarray) -> None:
        try:
            self.fetch(words)
        except Unavailable as error:  # the requested objects have been read
            logger.info("hot objects are not copied here: %s", error)

    def _verifies(self) -> bool:
        return self._verify > 0 and random.random() < self._verify
