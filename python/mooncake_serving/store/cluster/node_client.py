"""Requests of a node about another node's pool: to its engine, or to the node itself.

An engine carries out small ones at once, without Python. It cannot use a disk, check a quota or
make room, and takes no options.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Literal

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer, copy_to_host
from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.pool import PoolStats, PutResult, Retention, checksum_of
from mooncake_kernels.transfer import MAX_RPC_BYTES, MAX_RPC_KEYS, ObjectStatus, Peer
from mooncake_kernels.transfer.objects import remove_checked, write_checked

from ...rpc import Peers
from ..checks import RETENTIONS
from .destinations import Places
from .membership import PeerBackoff
from .memory import Offers, RegisteredMemory
from .messages import (
    MAX_KEYS,
    MAX_PLACES_BYTES,
    MAX_PULLED,
    PLACE,
    PLACE_BYTES,
    Drop,
    Dropped,
    Missed,
    NodeRpc,
    Pull,
    Pulled,
    Retain,
    Retained,
    Stat,
    Stats,
    key_bytes,
)
from .put import NORMAL, PutBatch

logger = logging.getLogger(__name__)

Pulls = list[PutResult | str]  # a string is the reason of a failure
NewResult = PutResult | Literal["unsure"] | None

UNSURE: Literal["unsure"] = "unsure"
RESULTS = {
    ObjectStatus.DONE: PutResult.STORED,
    ObjectStatus.EXISTS: PutResult.EXISTS,
    ObjectStatus.BEING_WRITTEN: PutResult.BEING_WRITTEN,
}
NEW: dict[int, NewResult] = {
    ObjectStatus.DONE: PutResult.STORED,
    ObjectStatus.BEING_WRITTEN: PutResult.BEING_WRITTEN,
    ObjectStatus.UNSURE: UNSURE,
}
DONE = int(ObjectStatus.DONE)  # an array is slow to compare with an enum's member
LATE = int(ObjectStatus.LATE)


class NodeClient:
    """Requests to other nodes, any number of keys at a time. Thread-safe.

    All methods but ``tell_missed`` raise ``TransferError`` if the node cannot be reached, refuses,
    or does not answer in time; the request may have been carried out even so.

    Args:
        rpc: sends the requests.
        peers: connections to the nodes.
        backoff: is notified of engines that have answered.
        offers: memory that they may read.
        memory: registers the rest temporarily.
        answer_s: how long an answer may take.
        read_s: how long the reads that it needs may take in addition.
    """

    def __init__(
        self,
        rpc: NodeRpc,
        peers: Peers,
        backoff: PeerBackoff,
        offers: Offers,
        memory: RegisteredMemory,
        answer_s: float,
        read_s: float,
    ):
        self._rpc = rpc
        self._peers = peers
        self._backoff = backoff
        self._offers = offers
        self._memory = memory
        self._answer_s = answer_s
        self._pull_s = answer_s + read_s

    def pull(
        self,
        member: str,
        keys: np.ndarray,
        source: str,
        *,
        options: np.ndarray | None = None,
        verify: bool = True,
    ) -> Pulls:
        """Have a node copy ``[n, 2]`` objects of the pool that ``source`` serves; ``options``:
        ``[n]`` of ``PUT_OPTIONS``, how it keeps them.
        """
        results: Pulls = []
        for first in range(0, len(keys), MAX_PULLED):
            part = slice(first, first + MAX_PULLED)
            part_options = None if options is None else options[part]
            results += self._pull(member, keys[part], source, verify, options=part_options)
        return results

    def put(self, member: str, batch: PutBatch, *, verify: bool) -> list[PutResult | None]:
        """Have a node's engine store n objects. They are not published; their positions are lost.

        Args:
            member: its name.
            batch: n objects; what is kept longer than normally is left to the node.
            verify: compare what has arrived with what is here.

        Returns:
            The result of each; None: ask the node, which can make room.
        """
        normal = np.flatnonzero(batch.options["retention"] == NORMAL).tolist()
        if not normal:
            return [None] * len(batch.words)
        return self._peers.use(
            member, self._answer_s, self._put_inline, batch.words, batch.objects, normal, verify
        )

    def put_new(
        self,
        member: str,
        keys: np.ndarray,
        places: list[Places],
        num_bytes: int,
        *,
        verify: bool,
    ) -> list[NewResult] | None:
        """Have a node's engine list objects in the directory and store them, if no one has or
        writes them.

        Args:
            member: its name.
            keys: ``[n, 2]``.
            places: for each object its memory, (address, bytes).
            num_bytes: of all of them.
            verify: compare what has arrived with what is here.

        Returns:
            For each ``STORED``; ``BEING_WRITTEN`` into that pool by another writer; None: it did
            not; ``UNSURE``: nor that, but it may have listed it. None instead of a list: it does
            not do that.

        Raises:
            Unavailable: the directory has not answered the engine in time.
        """
        with self._peers.lease(member, self._answer_s) as peer:
            if not self._peers.prefers_rpc(peer, num_bytes):
                return None
            try:
                statuses = write_checked(
                    self._peers.engine, peer, keys, places, True, verify, self._pull_s
                )
            except Unavailable:
                return None
        if self._backoff.silent:
            self._backoff.heard(member)
        found = statuses.tolist()
        if LATE in found:  # so would be the answer to a claim
            raise Unavailable("put: the directory does not answer in time")
        return [NEW.get(status) for status in found]

    def give(self, member: str, batch: PutBatch, source: str, *, verify: bool = True) -> Pulls:
        """Have a node copy n objects out of this node's memory.

        Args:
            member: its name.
            batch: n objects in host memory, which is registered temporarily if need be.
            source: name of this node.
            verify: whether what has arrived is compared with what is here.
        """
        keys, objects, options = batch
        objects = [_fitting(parts) for parts in objects]
        results: Pulls = []
        sizes = [PLACE_BYTES * len(parts) for parts in objects]
        for first, end in _batches(sizes, MAX_PLACES_BYTES, MAX_PULLED):
            with ExitStack() as under_way:
                lend = self._memory.lend
                lent = [
                    [under_way.enter_context(lend(part)) for part in parts]
                    for parts in objects[first:end]
                ]
                places = [_places(parts) for parts in lent]
                sums = [checksum_of(*parts) for parts in lent] if verify else []
                results += self._pull(
                    member, keys[first:end], source, verify, places, sums, options[first:end]
                )
        return results

    def remove(self, member: str, keys: np.ndarray) -> np.ndarray:
        """Have a node's engine, or else the node, remove ``[n, 2]`` objects: ``[n]`` bool, which
        were there. They are not withdrawn.
        """
        removed = self._peers.use(member, self._answer_s, self._remove_inline, keys)
        if removed is None:
            removed = np.array([self.drop(member, keys[[i]]) > 0 for i in range(len(keys))], bool)
        return removed

    def drop(self, member: str, keys: np.ndarray) -> int:
        """Have a node remove and withdraw ``[n, 2]`` objects; returns how many there were."""
        count = 0
        for first in range(0, len(keys), MAX_KEYS):
            part = key_bytes(keys[first : first + MAX_KEYS])
            count += self._rpc.request(member, Drop, Dropped, self._answer_s, keys=part).count
        return count

    def retain(self, member: str, key: np.ndarray, retention: Retention) -> bool:
        """Have a node keep an object, ``[1, 2]``, for so long; returns whether its pool has it."""
        answer = self._rpc.request(
            member, Retain, Retained, self._answer_s,
            keys=key_bytes(key), retention=RETENTIONS.index(retention),
        )  # fmt: skip
        return answer.count > 0

    def tell_missed(self, member: str, keys: np.ndarray) -> None:
        """Tell a node what its pool does not have, so that it is withdrawn: not from here, since it
        may have been put there meanwhile. If the message is lost, the node finds it by itself.
        """
        try:
            for first in range(0, len(keys), MAX_KEYS):
                part = key_bytes(keys[first : first + MAX_KEYS])
                missed = self._rpc.make(Missed, self._answer_s, keys=part)
                self._rpc.post(member, missed, self._answer_s)
        except TransferError as error:
            logger.info("%s finds by itself what it does not have: %s", member, error)

    def stat(self, member: str) -> PoolStats | None:
        """Return the statistics of a node's pool; None if it has none."""
        return self._rpc.request(member, Stat, Stats, self._answer_s).pool

    def _put_inline(
        self,
        peer: Peer,
        keys: np.ndarray,
        objects: Sequence[Sequence[Buffer]],
        chosen: Sequence[int],
        verify: bool,
    ) -> list[PutResult | None]:
        """``put`` of those of n objects that are chosen, in host memory and small enough."""
        results: list[PutResult | None] = [None] * len(keys)
        suited, sizes = [], []
        for i in chosen:
            num_bytes = sum(part.num_bytes for part in objects[i])
            if (
                num_bytes <= MAX_RPC_BYTES
                and all(part.is_host for part in objects[i])
                and self._peers.prefers_rpc(peer, num_bytes)
            ):
                suited.append(i)
                sizes.append(num_bytes)
        for first, end in _batches(sizes, MAX_RPC_BYTES, MAX_RPC_KEYS):
            batch = suited[first:end]
            places = [[(part.address, part.num_bytes) for part in objects[i]] for i in batch]
            try:
                statuses = write_checked(
                    self._peers.engine, peer, keys[batch], places, False, verify, self._pull_s
                )
            except Unavailable:
                return results
            if self._backoff.silent:
                self._backoff.heard(peer.name)
            for i, status in zip(batch, statuses.tolist(), strict=True):
                results[i] = RESULTS.get(status)
        return results

    def _remove_inline(self, peer: Peer, keys: np.ndarray) -> np.ndarray | None:
        """``remove`` by the engine; None: it cannot do that."""
        if peer.transport == "local":
            return None
        removed = np.zeros(len(keys), bool)
        for first in range(0, len(keys), MAX_RPC_KEYS):
            part = slice(first, first + MAX_RPC_KEYS)
            engine = self._peers.engine
            try:
                removed[part] = remove_checked(engine, peer, keys[part], self._answer_s) == DONE
            except Unavailable:
                return None
            if self._backoff.silent:
                self._backoff.heard(peer.name)
        return removed

    def _pull(
        self,
        member: str,
        keys: np.ndarray,
        source: str,
        verify: bool,
        places: Sequence[bytes] = (),
        checksums: Sequence[int] = (),
        options: np.ndarray | None = None,
    ) -> Pulls:
        number = self._rpc.next_number()
        if places:
            self._offers.add(number, member)
        try:
            answer = self._rpc.request(
                member, Pull, Pulled, self._pull_s,
                number=number, keys=key_bytes(keys), source=source, verify=verify,
                places=list(places), checksums=np.array(checksums, "<u8").tobytes(),
                options=b"" if options is None else options.tobytes(),
            )  # fmt: skip
        finally:
            self._offers.end(number, member)  # what is not taken by now must never be
        return [PutResult(r) if isinstance(r, int) else r for r in answer.results]


def _fitting(parts: Sequence[Buffer]) -> Sequence[Buffer]:
    """The parts of an object; a copy of all if they are more than fit into a request."""
    if len(parts) * PLACE_BYTES <= MAX_PLACES_BYTES:
        return parts
    return [as_buffer(copy_to_host(parts))]


def _places(parts: Sequence[Buffer]) -> bytes:
    return np.array([(part.address, part.num_bytes) for part in parts], PLACE).tobytes()


def _batches(sizes: Sequence[int], most_bytes: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of objects that fit into one request, whose places or bytes have these sizes."""
    first = num_bytes = 0
    for i, size in enumerate(sizes):
        if i - first == most or num_bytes + size > most_bytes:
            yield first, i
            first, num_bytes = i, 0
        num_bytes += size
    if first < len(sizes):
        yield first, len(sizes)
