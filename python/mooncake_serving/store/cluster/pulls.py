"""Copies that this node takes at another's request."""

from collections.abc import Callable, Sequence

import numpy as np

from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError
from mooncake_kernels.pool import PutResult

from ...rpc import MAX_REASON, Peers
from ..directory import Holders, Member
from ..store import Store
from .claims import Admission
from .destinations import GONE, Places, PoolDestination, keep_copies
from .directory_entries import DirectoryEntries
from .memory import RegisteredMemory, Row
from .messages import PLACE, NodeRpc, Pull, Pulled, Release, Released, keys_of, reason_of
from .reads import Reads


class Puller:
    """Takes copies into this node's pool, and publishes them. Thread-safe.

    Only for members of the directory, and only from them: whoever asks for a copy names the engine
    that this node connects to.
    """

    def __init__(
        self,
        store: Store,
        admission: Admission,
        entries: DirectoryEntries,
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
        self._reads = reads
        self._rpc = rpc
        self._peers = peers
        self._memory = memory
        self._find = find
        self._answer_s = answer_s

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
                return Pulled(request.number, ["it is draining"] * len(keys))
            return Pulled(request.number, self._pull(request, keys))

    def _pull(self, request: Pull, keys: np.ndarray) -> list[int | str]:
        copies = None if request.places else self._entries.copies
        destinations = [
            PoolDestination(self._store, tuple(key), copies, options)
            for key, options in zip(keys.tolist(), request.option_rows(), strict=True)
        ]
        if request.places:
            reasons = self._from_memory(request, destinations)
            is_new = np.array(
                [destination.result is PutResult.STORED for destination in destinations], bool
            )
            self._store.age_tail_first(keys[is_new])
            self._entries.publish(keys[is_new])
            is_old = np.array(
                [destination.result is PutResult.EXISTS for destination in destinations], bool
            )
            self._entries.publish_copies(keys[is_old])  # not as put: it may have been removed
        else:
            reasons = self._from_pool(request, keys, destinations)
            for i in keep_copies(self._store, self._entries, keys, destinations):
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


def _rows(places: Places, parts: Sequence[tuple[int, int]]) -> list[Row]:
    """How one range of local memory is filled from the parts of an object, one after another."""
    rows, done = [], places[0][0] if places else 0
    for address, num_bytes in parts:
        if num_bytes:
            rows.append((done, address, num_bytes))
            done += num_bytes
    return rows
