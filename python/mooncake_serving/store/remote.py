"""Reading objects of other pools: pin, read, release; and the next holder if that fails."""

import enum
import logging
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, wait

import numpy as np

from mooncake_kernels.errors import TransferError, Unavailable

from . import messages
from .calls import Calls
from .candidates import Candidates
from .directory import Member
from .messages import Pin, Pinned, Release, Released, key_bytes
from .moving import Move, Mover
from .peers import Peers
from .sinks import Sink

logger = logging.getLogger(__name__)

PINS_AT_ONCE = 256  # of a holder: it has 4096 for all readers


class Outcome(enum.Enum):
    """What came of reading an object."""

    DONE = 0
    ABSENT = 1
    DAMAGED = 2
    NOT_TAKEN = 3  # by its sink
    UNREACHED = 4  # nobody can say
    BUSY = 5  # too much is pinned there
    SPOILED = 6  # it, or what was read with it, on its way


OUTCOMES = {
    messages.PINNED: Outcome.DONE,  # unless it fails
    messages.ABSENT: Outcome.ABSENT,
    messages.DAMAGED: Outcome.DAMAGED,
    messages.BUSY: Outcome.BUSY,
}


class RemoteReader:
    """Reads from holders, several of them at a time. Thread-safe.

    Args:
        calls: to ask them.
        peers: to reach them.
        mover: to read.
        executor: runs what goes on at a time.
        withdraw: tells the directory that a pool does not have objects: ``(keys, pool)``.
        host: of this node, whose pools are asked first.
        answer_s: how long an answer may take.
        read_s: how long it may take to read what was pinned at once.
    """

    def __init__(
        self,
        calls: Calls,
        peers: Peers,
        mover: Mover,
        executor: Executor,
        withdraw: Callable[[np.ndarray, str], object],
        *,
        host: str,
        answer_s: float,
        read_s: float,
    ):
        self._calls = calls
        self._peers = peers
        self._mover = mover
        self._executor = executor
        self._withdraw = withdraw
        self._host = host
        self._answer_s = answer_s
        self._read_s = read_s

    def read(
        self,
        keys: np.ndarray,
        sinks: Sequence[Sink],
        pools: Sequence[Sequence[str]],
        members: Sequence[Member],
        *,
        verify: bool,
    ) -> list[Outcome]:
        """Read n objects, each from the first of its pools that has it and can be reached.

        Args:
            keys: ``[n, 2]``.
            sinks: n, where they go.
            pools: for each object, names of pools that may have it.
            members: who serves pools.
            verify: whether holders compare objects with their checksums first, and what has
                arrived afterwards.

        Returns:
            For each: ``DONE``; ``NOT_TAKEN`` by its sink; ``DAMAGED``: it was where it could be
            read; ``ABSENT``.
        """
        served: dict[str, list[Member]] = defaultdict(list)
        for member in members:
            served[member.pool].append(member)
        candidates = [Candidates([served[p] for p in names], self._host) for names in pools]
        outcomes = [Outcome.ABSENT] * len(keys)
        done: set[int] = set()
        while groups := _groups([i for i in range(len(keys)) if i not in done], candidates):
            missing: dict[str, list[int]] = defaultdict(list)
            for member, indices, results in self._read_groups(groups, keys, sinks, verify):
                is_busy = set(results) <= {Outcome.BUSY, Outcome.UNREACHED}
                for i, result in zip(indices, results, strict=True):
                    if result is Outcome.ABSENT:
                        missing[member.pool].append(i)
                        candidates[i].drop_pool()
                    elif result in (Outcome.DAMAGED, Outcome.SPOILED):
                        outcomes[i] = Outcome.DAMAGED
                        candidates[i].drop_pool()
                    elif result in (Outcome.DONE, Outcome.NOT_TAKEN):
                        outcomes[i] = result
                        done.add(i)
                    elif result is Outcome.UNREACHED or is_busy:
                        candidates[i].drop_member()
            for pool, indices in missing.items():
                self._withdraw(keys[indices], pool)
        return outcomes

    def _read_groups(
        self,
        groups: Sequence[tuple[Member, list[int]]],
        keys: np.ndarray,
        sinks: Sequence[Sink],
        verify: bool,
    ) -> list[tuple[Member, list[int], list[Outcome]]]:
        def read_group(group: tuple[Member, list[int]]) -> tuple[Member, list[int], list[Outcome]]:
            member, indices = group
            results: list[Outcome] = []
            for first in range(0, len(indices), PINS_AT_ONCE):
                part = indices[first : first + PINS_AT_ONCE]
                found = self._read_from(member, keys[part], [sinks[i] for i in part], verify)
                if found[0] is Outcome.SPOILED and len(part) > 1:  # which of them was it?
                    found = [
                        self._read_from(member, keys[[i]], [sinks[i]], verify)[0] for i in part
                    ]
                results += found
                if found[-1] is Outcome.UNREACHED:
                    break
            missing = len(indices) - len(results)
            return member, indices, results + [Outcome.UNREACHED] * missing

        if len(groups) == 1:
            return [read_group(groups[0])]
        reads = [self._executor.submit(read_group, group) for group in groups]
        wait(reads)  # all of them, before an error of one lets the caller free its buffers
        return [read.result() for read in reads]

    def _read_from(
        self, member: Member, keys: np.ndarray, sinks: Sequence[Sink], verify: bool
    ) -> list[Outcome]:
        """Read what one holder has of some objects."""
        token = self._calls.next_number()
        opened: list[Sink] = []
        is_good = is_pinned = False
        try:
            answer = self._calls.ask(
                member.name, Pin, Pinned, self._answer_s, valid_s=self._answer_s + self._read_s,
                number=token, keys=key_bytes(keys), verify=verify,
            )  # fmt: skip
            is_pinned = True
            results, moves = _open(answer, sinks, opened, member)
            if moves:
                with self._peers.lease(member.name, self._answer_s) as peer:
                    self._mover.read(peer, moves, checksum=verify, deadline_s=self._read_s)
            is_pinned = False
            is_good = self._release(member, token)
            if not is_good:
                raise TransferError(member.name, "release: it took this node for dead")
        except (TransferError, Unavailable) as error:
            logger.info("%s is passed over: %s", member.name, error)
            is_spoiled = isinstance(error, TransferError) and error.cause.startswith("checksum")
            return [Outcome.SPOILED if is_spoiled else Outcome.UNREACHED] * len(keys)
        finally:
            for sink in opened:
                sink.commit() if is_good else sink.abort()
            if is_pinned:
                self._try_to_release(member, token)
        return results

    def _release(self, member: Member, token: int) -> bool:
        return self._calls.ask(member.name, Release, Released, self._answer_s, token=token).held

    def _try_to_release(self, member: Member, token: int) -> None:
        try:
            self._release(member, token)
        except (TransferError, Unavailable) as error:
            logger.info("%s lets go by itself: %s", member.name, error)


def _groups(
    pending: Sequence[int], candidates: Sequence[Candidates]
) -> list[tuple[Member, list[int]]]:
    """Whom to ask next, and for which objects."""
    groups: dict[Member, list[int]] = defaultdict(list)
    for i in pending:
        if (member := candidates[i].best()) is not None:
            groups[member].append(i)
    return list(groups.items())


def _open(
    answer: Pinned, sinks: Sequence[Sink], opened: list[Sink], member: Member
) -> tuple[list[Outcome], list[Move]]:
    """What is there, and what is to be moved of it; adds the sinks that want it to ``opened``."""
    rows = answer.rows().tolist()
    if len(rows) != len(sinks):
        raise TransferError(member.name, f"pin: {len(rows)} answers to {len(sinks)} keys")
    results: list[Outcome] = []
    moves: list[Move] = []
    for sink, (status, address, num_bytes) in zip(sinks, rows, strict=True):
        outcome = OUTCOMES.get(status, Outcome.UNREACHED)
        if outcome is Outcome.DONE:
            if num_bytes > member.capacity_bytes or address + num_bytes >= 1 << 64:
                raise TransferError(member.name, f"pin: an object of {num_bytes} bytes")
            ranges = sink.open(num_bytes)
            if ranges is None:
                outcome = Outcome.NOT_TAKEN
            else:
                opened.append(sink)
                moves.extend((address, part) for part in ranges)
        results.append(outcome)
    return results, moves
