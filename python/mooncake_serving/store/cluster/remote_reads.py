"""Reads objects of other pools, from the first holder that has them.

By key, in one round trip, if that is faster; otherwise the holder's node pins them, they are read
by address, and the node releases them.
"""

import logging
import random
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Executor, Future, wait

import numpy as np

from mooncake_kernels.errors import FailureKind, TransferError, Unavailable

from ...rpc import Peers
from ..directory import Member
from .destinations import Destination, Outcome
from .fetcher import NOT_PINNED, Fetcher, PendingRead, open_destinations
from .membership import PeerBackoff
from .messages import MAX_KEYS, Missed, NodeRpc, Pin, Pinned, Release, Released, key_bytes
from .object_rpc import ObjectRpc

logger = logging.getLogger(__name__)

Read = tuple[Member, list[int], list[Outcome]]  # from which member, which ones, and their results
PINS_AT_ONCE = 256  # at one holder: it has 4096 for all readers
SOONER_BYTES = 4 << 20  # up to here computing a checksum is faster than an answer of the holder


class Candidates:
    """Members whose pools may have an object: those of one host first, the others in any order.

    Args:
        pools: for each pool that may have it, the members that serve it.
        host: whose pools are asked first.
    """

    def __init__(self, pools: Sequence[Sequence[Member]], host: str):
        self._by_pool = [list(served_by) for served_by in pools if served_by]
        for served_by in self._by_pool:
            if len(served_by) > 1:  # usually there is one, and this would be most of the work
                random.shuffle(served_by)
        if len(self._by_pool) > 1:
            random.shuffle(self._by_pool)
            self._by_pool.sort(key=lambda served_by: served_by[0].host != host)

    def best(self) -> Member | None:
        """The member to ask next; None: none is left."""
        return self._by_pool[0][0] if self._by_pool else None

    def drop_member(self) -> None:
        """Drop the best member, which cannot be asked; others may serve its pool."""
        del self._by_pool[0][0]
        if not self._by_pool[0]:
            del self._by_pool[0]

    def drop_pool(self) -> None:
        """Drop the pool of the best member, which has answered for it."""
        del self._by_pool[0]


class RemoteReader:
    """Reads from holders, several of them at a time. Thread-safe.

    Args:
        rpc: sends the requests.
        peers: connections to the holders.
        object_rpc: reads small objects.
        fetcher: reads all others.
        executor: runs concurrent reads.
        backoff: holders that are not asked.
        host: of this node, whose pools are asked first.
        answer_s: how long an answer may take.
        read_s: how long it may take to read what was pinned at once.
    """

    def __init__(
        self,
        rpc: NodeRpc,
        peers: Peers,
        object_rpc: ObjectRpc,
        fetcher: Fetcher,
        executor: Executor,
        backoff: PeerBackoff,
        *,
        host: str,
        answer_s: float,
        read_s: float,
    ):
        self._rpc = rpc
        self._peers = peers
        self._object_rpc = object_rpc
        self._fetcher = fetcher
        self._executor = executor
        self._backoff = backoff
        self._host = host
        self._answer_s = answer_s
        self._read_s = read_s

    def read(
        self,
        keys: np.ndarray,
        destinations: Sequence[Destination],
        pools: Sequence[Sequence[str]],
        members: Sequence[Member],
        *,
        verify: bool,
    ) -> list[Outcome]:
        """Read n objects, each from the first of its pools that has it and can be reached.

        Args:
            keys: ``[n, 2]``.
            destinations: n destinations.
            pools: for each object, names of pools that may have it.
            members: those that serve pools.
            verify: whether what has arrived is compared with its checksum.

        Returns:
            For each: ``DONE``; ``NOT_TAKEN`` by its destination; ``DAMAGED``: every copy that could
            be read is; ``ABSENT``: no pool has it; ``UNREACHED``: of those that answer.
        """
        served: dict[str, list[Member]] = defaultdict(list)
        silent: set[str] = set()
        for member in members:
            if member in self._backoff:
                silent.add(member.pool)
            else:
                served[member.pool].append(member)
        unreached = {i for i, names in enumerate(pools) if not silent.isdisjoint(names)}
        candidates = [Candidates([served[p] for p in names], self._host) for names in pools]
        outcomes = [Outcome.ABSENT] * len(keys)
        done: set[int] = set()
        missed: dict[str, list[int]] = defaultdict(list)  # by the member that does not have them
        while groups := _groups([i for i in range(len(keys)) if i not in done], candidates):
            for member, indices, results in self._read_groups(groups, keys, destinations, verify):
                is_busy = set(results) <= {Outcome.BUSY, Outcome.UNREACHED}
                for i, result in zip(indices, results, strict=True):
                    if result is Outcome.ABSENT:
                        missed[member.name].append(i)
                        candidates[i].drop_pool()
                    elif result in (Outcome.DAMAGED, Outcome.SPOILED):
                        outcomes[i] = Outcome.DAMAGED
                        candidates[i].drop_pool()
                    elif result in (Outcome.DONE, Outcome.NOT_TAKEN):
                        outcomes[i] = result
                        done.add(i)
                    elif result is Outcome.UNREACHED or is_busy:
                        candidates[i].drop_member()
                        unreached.add(i)
        for i in unreached:
            if outcomes[i] is Outcome.ABSENT:
                outcomes[i] = Outcome.UNREACHED
        for name, indices in missed.items():
            self._tell_missed(name, keys[indices])
        return outcomes

    def _read_groups(
        self,
        groups: Sequence[tuple[Member, list[int]]],
        keys: np.ndarray,
        destinations: Sequence[Destination],
        verify: bool,
    ) -> list[Read]:
        def read_group(group: tuple[Member, list[int]]) -> Read:
            member, indices = group
            results: list[Outcome] = []
            for first in range(0, len(indices), PINS_AT_ONCE):
                part = indices[first : first + PINS_AT_ONCE]
                found = self._read_from(member, keys[part], [destinations[i] for i in part], verify)
                for at, i in enumerate(part):
                    if found[at] is Outcome.SPOILED:  # was it this one, and where?
                        [found[at]] = self._read_pinned(
                            member, keys[[i]], [destinations[i]], verify, is_careful=True
                        )
                results += found
                if found[-1] is Outcome.UNREACHED:
                    break
            missing = len(indices) - len(results)
            return member, indices, results + [Outcome.UNREACHED] * missing

        if len(groups) == 1:
            return [read_group(groups[0])]
        reads: list[Future[Read]] = []
        try:
            for group in groups:
                reads.append(self._executor.submit(read_group, group))
        finally:
            _wait_for_all(reads)  # so that the caller does not free its buffers too early
        return [read.result() for read in reads]

    def _read_from(
        self, member: Member, keys: np.ndarray, destinations: Sequence[Destination], verify: bool
    ) -> list[Outcome]:
        """Read objects of one holder, whichever way is faster."""
        found: list[Outcome | None] | None = None
        try:
            found = self._peers.use(
                member.name,
                self._answer_s,
                lambda peer: self._object_rpc.read(peer, keys, destinations, verify=verify),
            )
        except (TransferError, Unavailable) as error:
            self._passed_over(member, error)
            return [Outcome.UNREACHED] * len(keys)
        found = [None] * len(keys) if found is None else found
        if left := [i for i, outcome in enumerate(found) if outcome is None]:
            pinned = self._read_pinned(member, keys[left], [destinations[i] for i in left], verify)
            for i, outcome in zip(left, pinned, strict=True):
                found[i] = outcome
        return [outcome for outcome in found if outcome is not None]

    def _read_pinned(
        self,
        member: Member,
        keys: np.ndarray,
        destinations: Sequence[Destination],
        verify: bool,
        *,
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
            destination.takes_all or destination.was_compared for destination in destinations
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
            results = open_destinations(answer, destinations, opened, member)
            if not is_pinned:
                return results
            is_proved = not is_careful and _can_be_proved(opened, verify)
            if fetches := [fetch for one in opened for fetch in one.fetches()]:
                with self._peers.lease(member.name, self._answer_s) as peer:
                    checksum = (verify or is_careful) and not is_proved
                    self._fetcher.read(peer, fetches, checksum=checksum, deadline_s=self._read_s)
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
            self._passed_over(member, error)
            is_spoiled = isinstance(error, TransferError) and error.kind is FailureKind.CHECKSUM
            return [Outcome.SPOILED if is_spoiled else Outcome.UNREACHED] * len(keys)
        finally:
            for one in opened:
                one.destination.commit() if is_good else one.destination.abort()
            if is_pinned:  # what was busy is requested again, and shall find room then
                self._let_go(member, token, waits=Outcome.BUSY in results)
        return results

    def _tell_missed(self, name: str, keys: np.ndarray) -> None:
        """Tell a member what its pool does not have, so that it is withdrawn: not from here, since
        it may have been put there meanwhile. If the message is lost, the member finds it by itself.
        """
        try:
            for first in range(0, len(keys), MAX_KEYS):
                part = key_bytes(keys[first : first + MAX_KEYS])
                missed = self._rpc.make(Missed, self._answer_s, keys=part)
                self._rpc.post(name, missed, self._answer_s)
        except TransferError as error:
            logger.info("%s finds by itself what it does not have: %s", name, error)

    def _passed_over(self, member: Member, error: TransferError | Unavailable) -> None:
        logger.info("%s is passed over: %s", member.name, error)
        self._backoff.failed(member, error)

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


def _wait_for_all(reads: Sequence[Future[Read]]) -> None:
    """Wait until all are over, however often Ctrl-C comes: their deadlines end them."""
    interrupt: BaseException | None = None
    while True:
        try:
            wait(reads)
            break
        except BaseException as error:  # noqa: BLE001 - raised below
            interrupt = interrupt or error
            for read in reads:
                read.cancel()
    if interrupt is not None:
        raise interrupt


def _can_be_proved(opened: Sequence[PendingRead], verify: bool) -> bool:
    """Whether all have checksums, and all are whole objects."""
    if not all(one.checksum and one.destination.takes_all for one in opened):
        return False
    return verify or sum(one.num_bytes for one in opened) <= SOONER_BYTES


def _groups(
    pending: Sequence[int], candidates: Sequence[Candidates]
) -> list[tuple[Member, list[int]]]:
    """Which members to ask next, and for which objects."""
    groups: dict[Member, list[int]] = defaultdict(list)
    for i in pending:
        if (member := candidates[i].best()) is not None:
            groups[member].append(i)
    return list(groups.items())
