"""Reads of objects by address: their holder's node pins them, they are read, and it releases them.

So are objects that are large where that is faster, on a disk behind the pool, or bound for a GPU.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_kernels.buffers import Buffer
from mooncake_kernels.errors import FailureKind, TransferError, Unavailable
from mooncake_kernels.pool import checksum_of
from mooncake_kernels.transfer import WHOLE

from ...rpc import Peers
from ..directory import Member
from . import messages
from .destinations import Destination, Outcome, Places
from .membership import PeerBackoff
from .memory import RegisteredMemory, Row
from .messages import NodeRpc, Pin, Pinned, Release, Released, key_bytes

logger = logging.getLogger(__name__)

OUTCOMES = {
    messages.PINNED: Outcome.DONE,  # unless the read fails
    messages.ABSENT: Outcome.ABSENT,
    messages.DAMAGED: Outcome.DAMAGED,
    messages.BUSY: Outcome.BUSY,
}
NOT_PINNED = (messages.ABSENT, messages.DAMAGED, messages.BUSY)
PINS_AT_ONCE = 256  # at one holder: it has 4096 for all readers
SOONER_BYTES = 4 << 20  # up to here computing a checksum is faster than an answer of the holder


@dataclass(frozen=True)
class PendingRead:
    """An object that is being read, or a part of it.

    Attributes:
        destination: which has accepted it.
        address: of the first byte that is read at its holder.
        places: where it goes.
        checksum: as reported by its holder; 0: none.
    """

    destination: Destination
    address: int
    places: Places
    checksum: int

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.places)

    def rows(self) -> list[Row]:
        rows, remote = [], self.address
        for address, num_bytes in self.places:
            if num_bytes:
                rows.append((address, remote, num_bytes))
                remote += num_bytes
        return rows

    def check(self, member: Member) -> None:
        at = self.destination.location
        here = [Buffer(address, num_bytes, at, True, None) for address, num_bytes in self.places]
        if checksum_of(*here) != self.checksum:
            what = "checksum: what has arrived is not what was stored"
            raise TransferError(member.name, what, kind=FailureKind.CHECKSUM)


class PinnedReads:
    """Reads objects of holders by address. Thread-safe.

    Args:
        rpc: sends the requests.
        peers: connections to the holders.
        memory: by which what is pinned is read.
        backoff: is notified of holders that do not answer.
        answer_s: how long an answer may take.
        read_s: how long it may take to read what was pinned at once.
    """

    def __init__(
        self,
        rpc: NodeRpc,
        peers: Peers,
        memory: RegisteredMemory,
        backoff: PeerBackoff,
        answer_s: float,
        read_s: float,
    ):
        self._rpc = rpc
        self._peers = peers
        self._memory = memory
        self._backoff = backoff
        self._answer_s = answer_s
        self._read_s = read_s

    def read(
        self, member: Member, keys: np.ndarray, destinations: Sequence[Destination], *, verify: bool
    ) -> list[Outcome]:
        """Read n objects of one holder, some at a time.

        Args:
            member: the holder.
            keys: ``[n, 2]``.
            destinations: n destinations.
            verify: whether what has arrived is compared with its checksum.

        Returns:
            The result of each. ``SPOILED``: this one, or another one that was read with it.
        """
        outcomes: list[Outcome] = []
        for first in range(0, len(keys), PINS_AT_ONCE):
            part = slice(first, first + PINS_AT_ONCE)
            outcomes += self.read_at_once(member, keys[part], destinations[part], verify=verify)
            if outcomes[-1] is Outcome.UNREACHED:
                break
        return outcomes + [Outcome.UNREACHED] * (len(keys) - len(outcomes))

    def read_at_once(
        self,
        member: Member,
        keys: np.ndarray,
        destinations: Sequence[Destination],
        *,
        verify: bool,
        is_careful: bool = False,
    ) -> list[Outcome]:
        """Have objects pinned, read them, and have them released.

        With ``verify``, or if that is faster, what has arrived is compared with the checksums that
        the holder reports: then it is right, whatever became of the pins. Otherwise the pins must
        have been held until it was here. If there is no such checksum, or for a part of an object,
        ``verify`` makes the holder compare the object first, and the engine compare what has
        arrived with what is there; so does ``is_careful``.
        """
        is_careful |= verify and not all(
            destination.wanted[0] == WHOLE or destination.was_compared
            for destination in destinations
        )
        token = self._rpc.next_number()
        opened: list[PendingRead] = []
        results: list[Outcome] = []
        is_good = is_pinned = False
        try:
            answer = self._rpc.request(
                member.name, Pin, Pinned, self._answer_s, valid_s=self._answer_s + self._read_s,
                number=token, keys=key_bytes(keys), verify=is_careful,
            )  # fmt: skip
            is_pinned = not np.isin(answer.rows()["status"], NOT_PINNED).all()
            results = _open_destinations(answer, destinations, opened, member)
            if not is_pinned:
                return results
            is_proved = not is_careful and _can_be_proved(opened, verify)
            if rows := [row for one in opened for row in one.rows()]:
                checksum = (verify or is_careful) and not is_proved
                with self._peers.lease(member.name, self._answer_s) as peer:
                    self._memory.read(peer, rows, checksum=checksum, deadline_s=self._read_s)
            if is_proved:
                for one in opened:
                    one.check(member)
                is_good = True
            else:
                is_pinned = False
                is_good = self._release(member, token)
                if not is_good:
                    what = "release: it took this node for dead"
                    raise TransferError(member.name, what, kind=FailureKind.DISCONNECTED)
        except (TransferError, Unavailable) as error:
            self._backoff.failed(member, error)
            is_spoiled = isinstance(error, TransferError) and error.kind is FailureKind.CHECKSUM
            return [Outcome.SPOILED if is_spoiled else Outcome.UNREACHED] * len(keys)
        finally:
            for one in opened:
                one.destination.commit() if is_good else one.destination.abort()
            if is_pinned:  # what was busy is requested again, and shall find room then
                self._let_go(member, token, waits=Outcome.BUSY in results)
        return results

    def _release(self, member: Member, token: int) -> bool:
        return self._rpc.request(
            member.name, Release, Released, self._answer_s, token=token, is_answered=True
        ).held

    def _let_go(self, member: Member, token: int, *, waits: bool) -> None:
        try:
            if waits:
                self._release(member, token)
                return
            release = self._rpc.make(Release, self._answer_s, token=token, is_answered=False)
            self._rpc.post(member.name, release, self._answer_s)
        except TransferError as error:
            logger.info("%s lets go by itself: %s", member.name, error)


def _open_destinations(
    answer: Pinned, destinations: Sequence[Destination], opened: list[PendingRead], member: Member
) -> list[Outcome]:
    """Each object's result; those that their destinations accept are appended to ``opened``."""
    rows = answer.rows().tolist()
    if len(rows) != len(destinations):
        what = f"pin: {len(rows)} answers to {len(destinations)} keys"
        raise TransferError(member.name, what, kind=FailureKind.INCOMPATIBLE)
    results: list[Outcome] = []
    for destination, (status, address, num_bytes, checksum) in zip(destinations, rows, strict=True):
        outcome = OUTCOMES.get(status, Outcome.UNREACHED)
        if outcome is Outcome.DONE:
            if num_bytes > member.capacity_bytes or address + num_bytes >= 1 << 64:
                what = f"pin: an object of {num_bytes} bytes"
                raise TransferError(member.name, what, kind=FailureKind.INCOMPATIBLE)
            places = destination.open(num_bytes)
            if places is None:
                outcome = Outcome.NOT_TAKEN
            else:
                offset = destination.wanted[0]
                start = address if offset == WHOLE else address + offset
                opened.append(PendingRead(destination, start, places, checksum))
        results.append(outcome)
    return results


def _can_be_proved(opened: Sequence[PendingRead], verify: bool) -> bool:
    """Whether all have checksums, and all are whole objects."""
    if not all(one.checksum and one.destination.wanted[0] == WHOLE for one in opened):
        return False
    return verify or sum(one.num_bytes for one in opened) <= SOONER_BYTES
