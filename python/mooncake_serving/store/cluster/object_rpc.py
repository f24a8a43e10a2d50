"""Access to objects of other pools by key: a holder's engine looks them up and answers at once.

It does so without running Python there, so it cannot do what only the node can (use a disk, check a
quota, make room): then the node is asked, see ``remote_reads.py`` and ``node_client.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from mooncake_kernels.buffers import Buffer
from mooncake_kernels.errors import Unavailable
from mooncake_kernels.pool import PutResult
from mooncake_kernels.transfer import (
    MAX_RPC_BYTES,
    MAX_RPC_KEYS,
    ObjectStatus,
    Peer,
    TransferEngine,
)

from .destinations import Destination, Outcome

NewResult = PutResult | Literal["unsure"] | None

OUTCOMES = {
    ObjectStatus.ABSENT: Outcome.ABSENT,
    ObjectStatus.DONE: Outcome.DONE,  # unless the read fails
    ObjectStatus.DAMAGED: Outcome.SPOILED,  # its node is notified, and drops it
    ObjectStatus.BUSY: Outcome.BUSY,
    ObjectStatus.DOES_NOT_FIT: Outcome.NOT_TAKEN,
}
RESULTS = {
    ObjectStatus.DONE: PutResult.STORED,
    ObjectStatus.EXISTS: PutResult.EXISTS,
    ObjectStatus.BEING_WRITTEN: PutResult.BEING_WRITTEN,
}
UNSURE: Literal["unsure"] = "unsure"
DONE = int(ObjectStatus.DONE)  # an array is slow to compare with an enum's member
LATE = int(ObjectStatus.LATE)
NEW: dict[int, NewResult] = {
    ObjectStatus.DONE: PutResult.STORED,
    ObjectStatus.BEING_WRITTEN: PutResult.BEING_WRITTEN,
    ObjectStatus.UNSURE: UNSURE,
}
NEAR_BYTES = 256 << 10  # up to here it is faster than memory that is mapped, or a NIC


class ObjectRpc:
    """Reads, puts and removes objects of other pools in one round trip each. Thread-safe.

    Args:
        engine: sends the requests.
        answer_s: how long a holder may take to answer.
        read_s: how long the data may take in addition.
        heard: is called with the name of each holder that has answered.
    """

    def __init__(
        self,
        engine: TransferEngine,
        answer_s: float,
        read_s: float,
        heard: Callable[[str], object],
    ):
        self._engine = engine
        self._heard = heard
        self._answer_s = answer_s
        self._read_s = read_s

    def suits(self, peer: Peer, num_bytes: int) -> bool:
        """Whether this way is faster than reading by address, for this many bytes."""
        return peer.transport == "tcp" or (peer.transport != "local" and num_bytes <= NEAR_BYTES)

    def read(
        self, peer: Peer, keys: np.ndarray, destinations: Sequence[Destination], *, verify: bool
    ) -> list[Outcome | None] | None:
        """Read objects that a holder has in its pool.

        Args:
            peer: the holder.
            keys: ``[n, 2]``.
            destinations: n destinations.
            verify: compare everything that arrives with its checksum.

        Returns:
            The result of each; None: it is to be read another way. None instead of a list: all are.

        Raises:
            TransferError: the holder is gone, or does not answer in time; no destination has
                received anything.
        """
        in_host = all(destination.location.startswith("cpu") for destination in destinations)
        if not in_host or not self.suits(
            peer, sum(destination.wants()[1] for destination in destinations)
        ):
            return None
        compare = verify and not all(
            destination.takes_all or destination.was_compared for destination in destinations
        )
        wanted = np.array([destination.wants() for destination in destinations], np.uint64)
        try:
            reply = self._engine.read_objects(
                peer,
                keys,
                offsets=wanted[:, 0],
                sizes=wanted[:, 1],
                sums=verify,
                compare=compare,
                deadline_s=self._answer_s,
            )
        except Unavailable:
            return None
        self._heard(peer.name)
        opened: list[int] = []
        is_right = np.zeros(len(keys), bool)
        with reply:
            outcomes = [OUTCOMES.get(status) for status in reply.statuses.tolist()]
            places: list[list[tuple[int, int]]] = [[]] * len(keys)
            try:
                for i, num_bytes in enumerate(reply.object_bytes.tolist()):
                    if outcomes[i] is Outcome.NOT_TAKEN:
                        destinations[i].open(num_bytes)  # which gives it its size
                    elif outcomes[i] is Outcome.DONE:
                        ranges = destinations[i].open(num_bytes)
                        if ranges is None:
                            outcomes[i] = Outcome.NOT_TAKEN
                            continue
                        opened.append(i)
                        places[i] = [(part.address, part.num_bytes) for part in ranges]
                is_right = reply.receive(places, verify=verify, deadline_s=self._read_s)
            finally:
                for i in opened:
                    if is_right[i]:
                        destinations[i].commit()
                    else:
                        destinations[i].abort()
                        outcomes[i] = Outcome.SPOILED
        return outcomes

    def read_into(
        self,
        peer: Peer,
        keys: np.ndarray,
        places: Sequence[Sequence[tuple[int, int]]],
        *,
        verify: bool,
    ) -> np.ndarray | None:
        """Read whole objects, each into memory that has room for it.

        Args:
            peer: the holder.
            keys: ``[n, 2]``.
            places: for each object pieces of host memory, (address, bytes).
            verify: compare what has arrived with its checksum.

        Returns:
            ``[n]`` int64: sizes of the objects; -1: it is to be read another way. None: all are.

        Raises:
            TransferError: the holder is gone, or does not answer in time.
        """
        num_bytes = 0
        for parts in places:
            for _, size in parts:
                num_bytes += size
        if not self.suits(peer, num_bytes):
            return None
        try:
            sizes = self._engine.read_objects_into(
                peer,
                keys,
                places,
                verify=verify,
                answer_s=self._answer_s,
                deadline_s=self._answer_s + self._read_s,
            )
        except Unavailable:
            return None
        self._heard(peer.name)
        return sizes

    def put(
        self,
        peer: Peer,
        keys: np.ndarray,
        objects: Sequence[Sequence[Buffer]],
        *,
        verify: bool,
    ) -> list[PutResult | None]:
        """Put objects into the pool of a holder.

        Args:
            peer: the holder.
            keys: ``[n, 2]``.
            objects: the parts of each, in order.
            verify: compare what has arrived with what is here.

        Returns:
            The result of each; None: ask its node, which can make room.

        Raises:
            TransferError: the holder is gone, or does not answer in time; some may be stored.
        """
        results: list[PutResult | None] = [None] * len(keys)
        sizes = [sum(part.num_bytes for part in parts) for parts in objects]
        host = [all(part.is_host for part in parts) for parts in objects]
        suited = [i for i, size in enumerate(sizes) if host[i] and self.suits(peer, size)]
        for batch in _batches([i for i in suited if sizes[i] <= MAX_RPC_BYTES], sizes):
            places = [[(part.address, part.num_bytes) for part in objects[i]] for i in batch]
            try:
                statuses = self._engine.write_objects(
                    peer,
                    keys[batch],
                    places,
                    verify=verify,
                    deadline_s=self._answer_s + self._read_s,
                )
            except Unavailable:
                return results
            self._heard(peer.name)
            for i, status in zip(batch, statuses.tolist(), strict=True):
                results[i] = RESULTS.get(status)
        return results

    def put_new(
        self,
        peer: Peer,
        keys: np.ndarray,
        places: Sequence[Sequence[tuple[int, int]]],
        num_bytes: int,
        *,
        verify: bool,
    ) -> list[NewResult] | None:
        """Have a holder list objects in the directory and store them, if no one has or writes them.

        Args:
            peer: the holder.
            keys: ``[n, 2]``.
            places: for each object its memory, (address, bytes).
            num_bytes: of all of them.
            verify: compare what has arrived with what is here.

        Returns:
            For each ``STORED``; ``BEING_WRITTEN`` into this pool by another writer; None: it did
            not; ``UNSURE``: nor that, but it may have listed it. None instead of a list: it does
            not do that.

        Raises:
            TransferError: the holder is gone, or does not answer in time; some may be stored.
            Unavailable: the directory has not answered the holder in time.
        """
        if not self.suits(peer, num_bytes):
            return None
        try:
            statuses = self._engine.write_objects(
                peer,
                keys,
                places,
                publish=True,
                verify=verify,
                deadline_s=self._answer_s + self._read_s,
            )
        except Unavailable:
            return None
        self._heard(peer.name)
        found = statuses.tolist()
        if LATE in found:  # so would be the answer to a claim
            raise Unavailable("put: the directory does not answer in time")
        return [NEW.get(status) for status in found]

    def remove(self, peer: Peer, keys: np.ndarray) -> np.ndarray | None:
        """Remove objects from the pool of a holder.

        Returns:
            ``[n]`` bool: which were there. None: ask its node.

        Raises:
            TransferError: the holder is gone, or does not answer in time; some may be removed.
        """
        removed = np.zeros(len(keys), bool)
        if peer.transport == "local":
            return None
        for first in range(0, len(keys), MAX_RPC_KEYS):
            part = slice(first, first + MAX_RPC_KEYS)
            try:
                statuses = self._engine.remove_objects(peer, keys[part], deadline_s=self._answer_s)
            except Unavailable:
                return None
            self._heard(peer.name)
            removed[part] = statuses == DONE
        return removed


def _batches(indices: Sequence[int], sizes: Sequence[int]) -> Iterator[list[int]]:
    """As many objects at a time as fit into a request."""
    batch: list[int] = []
    num_bytes = 0
    for i in indices:
        if batch and (num_bytes + sizes[i] > MAX_RPC_BYTES or len(batch) == MAX_RPC_KEYS):
            yield batch
            batch, num_bytes = [], 0
        batch.append(i)
        num_bytes += sizes[i]
    if batch:
        yield batch
