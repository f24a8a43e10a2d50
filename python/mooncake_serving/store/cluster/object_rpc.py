"""Puts into other pools, and removals, by key: a holder's engine carries them out at once.

It does so without running Python there, so it cannot do what only the node can (use a disk, check a
quota, make room): then the node is asked, see ``node_client.py``.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import numpy as np

from mooncake_kernels.buffers import Buffer
from mooncake_kernels.errors import Unavailable
from mooncake_kernels.pool import PutResult
from mooncake_kernels.transfer import MAX_RPC_BYTES, MAX_RPC_KEYS, ObjectStatus, Peer

from ...rpc import Peers

NewResult = PutResult | Literal["unsure"] | None

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


class ObjectRpc:
    """Puts and removes objects of other pools in one round trip each. Thread-safe.

    Args:
        peers: connections to the holders.
        answer_s: how long a holder may take to answer.
        read_s: how long it may take to send the data in addition.
        heard: is called with the name of each holder that has answered.
    """

    def __init__(
        self,
        peers: Peers,
        answer_s: float,
        read_s: float,
        heard: Callable[[str], object],
    ):
        self._peers = peers
        self._engine = peers.engine
        self._heard = heard
        self._answer_s = answer_s
        self._read_s = read_s

    def put(
        self,
        peer: Peer,
        keys: np.ndarray,
        objects: Sequence[Sequence[Buffer]],
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
        suited = [
            i for i, size in enumerate(sizes) if host[i] and self._peers.prefers_rpc(peer, size)
        ]
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
        if not self._peers.prefers_rpc(peer, num_bytes):
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
