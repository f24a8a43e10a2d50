"""Copies of other pools' objects in this node's pool: fetched, or taken at another's request."""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError
from mooncake_kernels.pool import Key, ObjectPut, PutResult, checksum_of
from mooncake_kernels.transfer import WHOLE

from ...rpc import MAX_REASON, Peers
from ..directory import Holders, Member
from ..store import Store
from .claims import Admission
from .destinations import Destination, Outcome, Places
from .directory_entries import CopyMarks, DirectoryEntries, Locations
from .memory import RegisteredMemory, Row
from .messages import PLACE, NodeRpc, Pull, Pulled, Release, Released, keys_of, reason_of
from .put import HARD, PUT_OPTIONS, put_arguments
from .reads import Reads

logger = logging.getLogger(__name__)

DEFAULT_OPTIONS: np.void = np.zeros(1, PUT_OPTIONS)[0]
GONE = "it was removed meanwhile"
DRAINING = "it is draining"


class PoolDestination(Destination):
    """This node's pool: room is made there as for any put.

    Args:
        store: of the pool.
        key: in it.
        copies: where it is marked, unless it is a put.
        options: a row of ``PUT_OPTIONS``: how it is kept.

    Attributes:
        result: of the put; None while there is none.
    """

    was_compared = False
    places: Places | None = None

    def __init__(
        self,
        store: Store,
        key: Key,
        copies: CopyMarks | None = None,
        options: np.void = DEFAULT_OPTIONS,
    ):
        self._store = store
        self._key = key
        self._copies = copies
        self._options = options
        self._put: ObjectPut | None = None
        self._stored_id = 0
        self.wanted = WHOLE, store.pool.capacity_bytes
        self.location = store.pool.buffer.location
        self.result: PutResult | None = None

    def open(self, num_bytes: int) -> Places | None:
        if num_bytes > self._store.pool.capacity_bytes:
            self.result = PutResult.FULL
            return None
        begun = self._store.begin_key(self._key, num_bytes, **put_arguments(self._options))
        if begun is PutResult.EXISTS:
            self.exists()
            return None
        if isinstance(begun, PutResult):
            self.result = begun
            return None
        self._put = begun
        if self._copies is not None:
            self._copies.begin(begun.id)
        return [(begun.buffer.address, num_bytes)] if num_bytes else []

    def exists(self) -> None:
        """Take the object for the one that is there already. A copy of one that is never evicted
        makes that one so, too: the other may go in its favour.
        """
        self.result = PutResult.EXISTS
        if self._copies is not None and self._options["retention"] == HARD:
            self._store.pool.retain(self._key, "hard")

    def checksum(self) -> int:
        """Checksum of the bytes, before they are committed."""
        return checksum_of() if self._put is None else checksum_of(self._put.buffer)

    def commit(self) -> None:
        if self._put is not None:
            try:
                self._put.commit()
            except BaseException:
                self.abort()
                raise
            if self._copies is not None:
                self._copies.commit(self._put.id)
            self.result = PutResult.STORED
            self._stored_id, self._put = self._put.id, None

    def retract(self) -> None:
        """Remove what was committed, if it is still there; then there is no result."""
        self.result = None
        if self._stored_id:
            self._store.remove_exactly(self._key, self._stored_id)
            self._unmark(self._stored_id)

    def abort(self) -> None:
        put, self._put = self._put, None
        if put is not None:
            self._unmark(put.id)  # it never becomes visible
            put.abort()

    def _unmark(self, object_id: int) -> None:
        if self._copies is not None:
            self._copies.end(np.array([object_id], np.uint64))


class Copies:
    """Takes copies into this node's pool, and publishes them. Thread-safe.

    Objects that were removed meanwhile are taken back. At another's request it takes only copies
    for members of the directory, and only from them: whoever asks for a copy names the engine that
    this node connects to.

    Args:
        store: of the pool.
        admission: to it.
        entries: of it.
        locations: where objects are.
        reads: of objects of other pools.
        rpc: sends requests to other nodes.
        peers: connections to them.
        memory: by which memory of others is read.
        find: returns a member by name.
        answer_s: how long an answer may take.
    """

    def __init__(
        self,
        store: Store,
        admission: Admission,
        entries: DirectoryEntries,
        locations: Locations,
        reads: Reads,
        rpc: NodeRpc,
        peers: Peers,
        memory: RegisteredMemory,
        find: Callable[[str], Member | None],
        answer_s: float,
    ):
        self._store = store
        self._admission = admission
        self._entries = entries
        self._locations = locations
        self._reads = reads
        self._rpc = rpc
        self._peers = peers
        self._memory = memory
        self._find = find
        self._answer_s = answer_s

    def fetch(
        self, words: np.ndarray, *, verify: bool
    ) -> tuple[list[PutResult | None], list[Outcome]]:
        """Copy those of ``[n, 2]`` objects that are not here.

        Returns:
            For each the result, see ``ClusterStore.fetch``, and that of its read.

        Raises:
            Unavailable: the directory does not answer, and some objects are not here.
        """
        results: list[PutResult | None] = [PutResult.EXISTS] * len(words)
        outcomes = [Outcome.DONE] * len(words)
        missing = np.flatnonzero(~self._store.has_keys(words))
        destinations = self._destinations(words[missing])
        pools, _ = self._locations.find(words[missing], anew=True)
        read = self._reads.read_each(words[missing], destinations, pools, verify=verify)
        for gone in self._keep(words[missing], destinations):
            read[gone] = Outcome.ABSENT
        for i, destination, outcome in zip(missing, destinations, read, strict=True):
            results[i], outcomes[i] = destination.result, outcome
        return results, outcomes

    def copy(self, words: np.ndarray, pools: Holders, options: np.ndarray) -> list[PutResult | str]:
        """Copy ``[n, 2]`` objects from pools that have them; ``options``: ``[n]`` of
        ``PUT_OPTIONS``, how this one keeps them, also if it has them already.

        Returns:
            For each ``STORED`` or ``EXISTS``: the pool has it now; or why not.
        """
        with self._admission.enter():
            if not self._admission.is_open:
                return [DRAINING] * len(words)
            destinations = self._destinations(words, options)
            is_here = self._store.has_keys(words)
            for i in np.flatnonzero(is_here).tolist():
                destinations[i].exists()
            missing = np.flatnonzero(~is_here).tolist()
            outcomes = self._reads.read_each(
                words[missing], [destinations[i] for i in missing], [pools[i] for i in missing]
            )
            results: list[PutResult | str] = [PutResult.EXISTS] * len(words)
            for i, outcome in zip(missing, outcomes, strict=True):
                results[i] = destinations[i].result or outcome.name
            for i in self._keep(words, destinations):
                results[i] = GONE
        return results

    def pull(self, sender: str, request: Pull) -> Pulled:
        """Carry out the request; failures are reported per key.

        Raises:
            InvalidArgument: the sender is no member, or offers memory of another one.
            Unavailable: it is not known as a member, and the directory does not answer.
        """
        if self._find(sender) is None:
            raise InvalidArgument(f"pull: sender must be a member, got {sender}")
        if request.places and request.source != sender:
            raise InvalidArgument(
                f"pull: source must be its sender, who offers places, got {request.source}"
            )
        keys = keys_of(request.keys)
        with self._admission.enter():
            if not self._admission.is_open:  # even for objects that are here, since they will leave
                return Pulled(request.number, [DRAINING] * len(keys))
            return Pulled(request.number, self._pull(request, keys))

    def _pull(self, request: Pull, keys: np.ndarray) -> list[int | str]:
        destinations = self._destinations(
            keys, request.option_rows(), are_copies=not request.places
        )
        if request.places:
            reasons = self._from_memory(request, destinations)
            is_new, is_old = _are_stored(destinations)
            self._store.age_tail_first(keys[is_new])
            self._entries.publish(keys[is_new])
            self._entries.publish_copies(keys[is_old])  # not as put: it may have been removed
        else:
            reasons = self._from_pool(request, keys, destinations)
            for i in self._keep(keys, destinations):
                reasons[i] = GONE
        return [
            reason if destination.result is None else destination.result.value
            for destination, reason in zip(destinations, reasons, strict=True)
        ]

    def _from_pool(
        self, request: Pull, keys: np.ndarray, destinations: Sequence[PoolDestination]
    ) -> list[str]:
        source = self._find(request.source)
        if source is None or not source.pool:
            what = "is no member" if source is None else "has no pool"
            return [f"{request.source} {what}"[:MAX_REASON]] * len(keys)
        pools: Holders = [(source.pool,)] * len(keys)
        serving = {source.pool: [source]}
        outcomes = self._reads.read_from(keys, destinations, pools, serving, verify=request.verify)
        return [f"{outcome.name} at {request.source}" for outcome in outcomes]

    def _from_memory(self, request: Pull, destinations: Sequence[PoolDestination]) -> list[str]:
        checksums = np.frombuffer(request.checksums, "<u8").tolist()
        opened: list[tuple[int, PoolDestination]] = []
        rows: list[Row] = []
        reason, is_good = "", False
        try:
            for i, (destination, place) in enumerate(
                zip(destinations, request.places, strict=True)
            ):
                parts = np.frombuffer(place, PLACE).tolist()
                places = destination.open(sum(num_bytes for _, num_bytes in parts))
                if places is not None:
                    opened.append((i, destination))
                    rows += _rows(places, parts)
            if rows:
                checksum = request.verify and not checksums
                with self._peers.lease(request.source, self._answer_s) as peer:
                    deadline_s = max(0.001, request.deadline_ms / 1000)
                    self._memory.read(peer, rows, checksum=checksum, deadline_s=deadline_s)
            if any(
                destination.checksum() != checksums[i] for i, destination in opened if checksums
            ):
                what = "checksum: what has arrived is something else"
                raise TransferError(request.source, what, kind=FailureKind.CHECKSUM)
            is_good = self._rpc.request(
                request.source, Release, Released, self._answer_s,
                token=request.number, is_answered=True,
            ).held  # fmt: skip
            reason = "the offer was withdrawn"
        except TransferError as error:
            reason = reason_of(error)
        finally:
            for _, destination in opened:
                destination.commit() if is_good else destination.abort()
        return [reason] * len(destinations)

    def _destinations(
        self, words: np.ndarray, options: np.ndarray | None = None, *, are_copies: bool = True
    ) -> list[PoolDestination]:
        marks = self._entries.copies if are_copies else None
        rows = [DEFAULT_OPTIONS] * len(words) if options is None else options
        return [
            PoolDestination(self._store, (first, second), marks, row)
            for (first, second), row in zip(words.tolist(), rows, strict=True)
        ]

    def _keep(self, words: np.ndarray, destinations: Sequence[PoolDestination]) -> list[int]:
        """Publish those of n copies in the pool that are still here. Those that were removed
        meanwhile are taken back, have no result, and are returned.
        """
        is_new, is_old = _are_stored(destinations)
        self._store.age_tail_first(words[is_new])
        here = np.flatnonzero(is_new | is_old)
        gone = here[~self._entries.publish_copies(words[here])].tolist()
        for i in gone:
            try:
                destinations[i].retract()
            except OSError as error:  # a stopped process holds the pool; the next look does it
                logger.warning("what was removed is still here: %s", error)
                self._entries.is_stale = True
        return gone


def _are_stored(destinations: Sequence[PoolDestination]) -> tuple[np.ndarray, np.ndarray]:
    """``[n]`` bool: which objects are new in the pool; and which were there already."""
    results = [destination.result for destination in destinations]
    is_new = np.array([result is PutResult.STORED for result in results], bool)
    return is_new, np.array([result is PutResult.EXISTS for result in results], bool)


def _rows(places: Places, parts: Sequence[tuple[int, int]]) -> list[Row]:
    """How one range of local memory is filled from the parts of an object, one after another."""
    rows, done = [], places[0][0] if places else 0
    for address, num_bytes in parts:
        if num_bytes:
            rows.append((done, address, num_bytes))
            done += num_bytes
    return rows
