"""How a node finds and reads objects of other pools."""

import ctypes
import logging
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from mooncake_kernels.buffers import (
    HOST,
    BounceBuffers,
    Buffer,
    as_buffer,
    as_writable,
    copy_to_host,
)
from mooncake_kernels.errors import ChecksumError, InvalidArgument, TransferError, Unavailable
from mooncake_kernels.transfer import MAX_RPC_KEYS, WHOLE, ObjectStatus, Peer
from mooncake_kernels.transfer.objects import read_checked, read_into_checked

from ...rpc import Peers
from ..checks import check_number
from ..directory import Holders, Member
from ..store import Store
from .destinations import Destination, Outcome, Places
from .directory_entries import DirectoryEntries, Locations
from .membership import Membership, PeerBackoff
from .node_client import NodeClient
from .pinned_reads import PinnedReads

logger = logging.getLogger(__name__)

Serving = Mapping[str, Sequence[Member]]  # by the name of a pool, who serves it
Group = tuple[Member, list[int]]  # a holder, and which objects it is asked for

ANY_SIZE = (1 << 64) - 1
READS_AT_ONCE = 8  # holders, of all threads together
PAUSE_S = 0.001  # while a holder has no pins left; the first one for what is about to be stored
MAX_PAUSE_S = 0.05
STORED_S = 1.0  # for which what is listed, and not stored yet, is waited for
DONE, ABSENT, DAMAGED = Outcome.DONE, Outcome.ABSENT, Outcome.DAMAGED  # looked up once
NOT_TAKEN, UNREACHED, BUSY = Outcome.NOT_TAKEN, Outcome.UNREACHED, Outcome.BUSY
SPOILED, BY_ADDRESS = Outcome.SPOILED, Outcome.BY_ADDRESS
GONE = (ABSENT, DAMAGED)
OUTCOMES = [BY_ADDRESS] * len(ObjectStatus)  # by what a holder's engine answers
OUTCOMES[ObjectStatus.ABSENT] = ABSENT
OUTCOMES[ObjectStatus.DONE] = DONE  # unless the read fails
OUTCOMES[ObjectStatus.DAMAGED] = SPOILED  # its node is notified, and drops it
OUTCOMES[ObjectStatus.BUSY] = BUSY
OUTCOMES[ObjectStatus.DOES_NOT_FIT] = NOT_TAKEN


class BufferDestination:
    """Packed, writable memory of the caller, filled as ``ObjectPool.get_into`` does.

    Data for a GPU goes to host memory first, until it is delivered.

    Attributes:
        num_bytes: size of the memory.
        object_bytes: size of the object, once it is known.
    """

    location = HOST

    def __init__(
        self,
        op: str,
        buffers: Sequence[Any],
        offset: int | None = None,
        *,
        was_compared: bool = False,
    ):
        held: Sequence[Buffer] = as_writable(op, buffers)
        if offset is not None:
            check_number(op, "offset", offset)
            offset = int(offset)  # one of numpy's would overflow
        self._bounce: BounceBuffers | None = None
        for buffer in held:
            if buffer.location != HOST:
                self._bounce = BounceBuffers(held)
                held = self._bounce.buffers
                break
        places: Places = []
        num_bytes = 0
        for buffer in held:
            places.append((buffer.address, buffer.num_bytes))
            num_bytes += buffer.num_bytes
        self._buffers = held  # as long as they are written to
        self._places = places
        self._offset = offset
        self.places = places if offset is None else None
        self.wanted = WHOLE if offset is None else offset, num_bytes
        self.was_compared = was_compared
        self.num_bytes = num_bytes
        self.object_bytes = 0

    def arrive(self, num_bytes: int) -> None:
        self.object_bytes = num_bytes

    def open(self, num_bytes: int) -> Places | None:
        self.object_bytes = num_bytes
        if self._offset is None:
            if num_bytes < self.num_bytes:
                return first_bytes(self._places, num_bytes)
            return self._places if num_bytes == self.num_bytes else None
        return self._places if self._offset + self.num_bytes <= num_bytes else None

    def refusal(self, op: str) -> InvalidArgument:
        """What ``ObjectPool.get_into`` raises if the object does not fit."""
        need = (
            f"must have room for {self.object_bytes} bytes, got {self.num_bytes}"
            if self._offset is None
            else f"and offset must be within the object's {self.object_bytes} bytes, got "
            f"{self.num_bytes} from {self._offset}"
        )
        return InvalidArgument(f"{op}: buffers {need}")

    def commit(self) -> None:
        pass  # it is in place, once it is delivered

    def deliver(self) -> None:
        """Copy to the GPUs what is in host memory on their behalf.

        Raises:
            Unavailable, CudaError: of the driver.
        """
        if self._bounce is not None:
            self._bounce.deliver(self.object_bytes if self._offset is None else self.num_bytes)

    def abort(self) -> None:
        pass  # the content of the buffers is undefined


class BytesDestination(Destination):
    """New memory, as large as the object."""

    location = HOST
    wanted = WHOLE, ANY_SIZE
    was_compared = False
    places: Places | None = None

    def __init__(self) -> None:
        self._array = np.empty(0, np.uint8)

    def open(self, num_bytes: int) -> Places | None:
        self._array = np.empty(num_bytes, np.uint8)
        return [(as_buffer(self._array).address, num_bytes)]

    def commit(self) -> None:
        pass

    def abort(self) -> None:
        pass

    def value(self) -> bytes:
        return self._array.tobytes()


def first_bytes(places: Places, num_bytes: int) -> Places:
    """The first bytes of memory."""
    first: Places = []
    for address, size in places:
        if part := min(size, num_bytes):
            first.append((address, part))
            num_bytes -= part
    return first


class Reads:
    """Reads of objects of other pools, many at a time, by keys of pools. Thread-safe.

    Where they are is remembered, or the directory is asked. They are grouped by holder, and each
    holder gets one request at a time, of at most 1,024 objects: its engine sends them with the
    answer if that is the fastest way, and otherwise its node pins them. What
    is missing then is looked for once more, with fresh answers of the directory.

    Args:
        store: of this node's pool; None: it has none.
        entries: of that pool.
        locations: where objects are.
        membership: who serves which pool.
        peers: connections to the holders.
        client: tells holders what they do not have.
        pinned: reads by address.
        backoff: holders that are not asked.
        host: of this node, whose pools are asked first.
        answer_s: how long an answer may take.
        read_s: how long the data may take in addition.
    """

    def __init__(
        self,
        store: Store | None,
        entries: DirectoryEntries,
        locations: Locations,
        membership: Membership,
        peers: Peers,
        client: NodeClient,
        pinned: PinnedReads,
        backoff: PeerBackoff,
        *,
        host: str,
        answer_s: float,
        read_s: float,
    ):
        self._store = store
        self._entries = entries
        self._locations = locations
        self._membership = membership
        self._peers = peers
        self._client = client
        self._pinned = pinned
        self._backoff = backoff
        self._host = host
        self._answer_s = float(answer_s)
        self._read_s = float(read_s)
        self._executor = ThreadPoolExecutor(READS_AT_ONCE, "mk-store-read")

    def close(self) -> None:
        """Wait for what is being read."""
        self._executor.shutdown()

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
            pools, _ = self._locations.find(words[~found], anew=True)
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
            pools = self._entries.match_prefix(words[count:])
            if not pools:
                break
            self._locations.remember(words[count : count + len(pools)], pools)
            count += len(pools)
        return count

    def read_each(
        self,
        words: np.ndarray,
        destinations: Sequence[Destination],
        pools: Holders | None = None,
        *,
        verify: bool = True,
    ) -> list[Outcome]:
        """Read objects of other pools.

        Args:
            words: ``[n, 2]`` keys of pools, of objects that are not in this node's.
            destinations: n destinations; the caller calls ``deliver``.
            pools: where they are, as the directory has just answered; None: to be found out.
            verify: whether what has arrived is compared with its checksum.

        Returns:
            For each: ``DONE``; ``NOT_TAKEN`` by its destination; ``DAMAGED``: every copy is;
            ``ABSENT``.

        Raises:
            Unavailable: the directory does not answer.
        """
        if not len(words):
            return []
        if pools is None:
            pools, is_remembered = self._locations.find(words)
        else:
            is_remembered = [False] * len(words)
        outcomes = self.read_from(words, destinations, pools, verify=verify)
        if outcomes.count(DONE) < len(outcomes):
            self._read_missing(words, destinations, pools, is_remembered, outcomes, verify)
        return outcomes

    def read_from(
        self,
        words: np.ndarray,
        destinations: Sequence[Destination],
        pools: Holders,
        serving: Serving | None = None,
        *,
        verify: bool,
    ) -> list[Outcome]:
        """Read objects, each from the first of its pools that has it and can be reached.

        Args:
            words: ``[n, 2]``.
            destinations: n destinations.
            pools: for each object, names of pools that may have it.
            serving: who serves each pool; None: the members of the directory.
            verify: whether what has arrived is compared with its checksum.

        Returns:
            For each: ``DONE``; ``NOT_TAKEN`` by its destination; ``DAMAGED``: every copy that could
            be read is; ``ABSENT``: no pool has it; ``UNREACHED``: of those that answer.

        Raises:
            Unavailable: a pool is served by an unknown member, and the directory does not answer.
        """
        holders = self._order(pools, serving)
        silent = self._backoff.among(holders) if self._backoff.silent else set()
        outcomes = [ABSENT] * len(words)
        missed: dict[str, list[int]] = {}  # by the member that does not have them
        left: Sequence[int] = range(len(words))
        until = time.monotonic() + self._answer_s
        while left and (groups := _group(left, holders, silent)):
            left = []
            if len(groups) == 1:
                results = [self._read_group(groups[0], words, destinations, verify)]
            else:
                results = self._read_groups(groups, words, destinations, verify)
            for (member, indices), found in zip(groups, results, strict=True):
                num_busy = 0
                for i, outcome in zip(indices, found, strict=True):
                    if outcome is DONE or outcome is NOT_TAKEN:
                        outcomes[i] = outcome
                        continue
                    left.append(i)
                    if outcome is BUSY:
                        num_busy += 1  # it is asked again if it has answered for others
                    elif outcome is UNREACHED:
                        silent.add(member.name)
                    else:
                        holders[i] = [other for other in holders[i] if other.pool != member.pool]
                        if outcome is ABSENT:
                            missed.setdefault(member.name, []).append(i)
                        else:
                            outcomes[i] = DAMAGED
                if num_busy == len(found):  # other readers have all pins, which they soon release
                    if time.monotonic() < until:
                        time.sleep(PAUSE_S)
                    else:
                        silent.add(member.name)
        if ABSENT in outcomes:
            for i, outcome in enumerate(outcomes):
                if outcome is ABSENT and holders[i]:
                    outcomes[i] = UNREACHED
        for name, missing in missed.items():
            self._client.tell_missed(name, words[missing])
        return outcomes

    def _order(self, pools: Holders, serving: Serving | None) -> list[list[Member]]:
        """For each object the members that may have it, the best first: of pools of this host, and
        then of the others, in any order; several members of a pool are in any order, too.
        """
        known = self._membership.serving if serving is None else serving
        orders: list[list[Member]] = []
        alone: dict[tuple[str, ...], list[Member]] = {}  # where there is no choice
        for names in pools:
            order = alone.get(names)
            if order is None:
                served = []
                for name in names:
                    if name not in known and serving is None:
                        self._membership.refresh()
                        known = serving = self._membership.serving
                    if members := known.get(name):
                        served.append(members)
                if len(served) > 1:
                    random.shuffle(served)
                    served.sort(key=lambda members: members[0].host != self._host)
                order = []
                for members in served:
                    order += random.sample(members, len(members)) if len(members) > 1 else members
                if len(order) < 2:
                    alone[names] = order
            orders.append(order)
        return orders

    def _read_groups(
        self,
        groups: Sequence[Group],
        words: np.ndarray,
        destinations: Sequence[Destination],
        verify: bool,
    ) -> list[list[Outcome]]:
        """Ask several holders at once: for each the results of its objects."""
        reads: list[Future[list[Outcome]]] = []
        try:
            for group in groups:
                reads.append(
                    self._executor.submit(self._read_group, group, words, destinations, verify)
                )
        finally:
            _wait_for_all(reads)  # so that the caller does not free its buffers too early
        return [read.result() for read in reads]

    def _read_group(
        self, group: Group, words: np.ndarray, destinations: Sequence[Destination], verify: bool
    ) -> list[Outcome]:
        """Read objects of one holder: with the answer of its engine, and the rest by address.

        One request follows the other: a holder has pins for some thousands of objects.
        """
        member, indices = group
        results: list[Outcome] = []
        for first in range(0, len(indices), MAX_RPC_KEYS):
            part = indices[first : first + MAX_RPC_KEYS]
            keys, into = words, destinations
            if len(part) < len(words):
                keys, into = words[part], [destinations[i] for i in part]
            try:
                found = self._peers.use(
                    member.name, self._answer_s, self._read_inline, keys, into, verify
                )
            except (TransferError, Unavailable) as error:
                self._backoff.failed(member, error)
                break
            if BY_ADDRESS in found:
                left = [i for i, outcome in enumerate(found) if outcome is BY_ADDRESS]
                rest = [into[i] for i in left]
                pinned = self._pinned.read(member, keys[left], rest, verify=verify)
                for i, outcome in zip(left, pinned, strict=True):
                    found[i] = outcome
            if SPOILED in found:  # was it this one, and where?
                for i, outcome in enumerate(found):
                    if outcome is SPOILED:
                        [found[i]] = self._pinned.read_at_once(
                            member, keys[[i]], [into[i]], verify=verify, is_careful=True
                        )
            results += found
            if found[-1] is UNREACHED:
                break
        return results + [UNREACHED] * (len(indices) - len(results))

    def _read_inline(
        self, peer: Peer, words: np.ndarray, destinations: Sequence[Destination], verify: bool
    ) -> list[Outcome]:
        """Have a holder's engine look objects up and send them with its answer, without its node.

        Returns:
            The result of each; ``BY_ADDRESS``: its node is to be asked, which can do more.

        Raises:
            TransferError: the holder is gone, or does not answer in time.
        """
        places: list[Places] = []  # as far as they are known beforehand
        num_bytes = 0
        for destination in destinations:
            num_bytes += destination.wanted[1]
            if destination.location != HOST:
                return [BY_ADDRESS] * len(words)
            if destination.places is not None:
                places.append(destination.places)
        if not self._peers.prefers_rpc(peer, num_bytes):
            return [BY_ADDRESS] * len(words)
        try:
            if len(places) < len(words):
                return self._read_opened(peer, words, destinations, verify)
            answer_s, all_s = self._answer_s, self._answer_s + self._read_s
            sizes = read_into_checked(
                self._peers.engine, peer, words, places, verify, answer_s, all_s
            )
            if self._backoff.silent:
                self._backoff.heard(peer.name)
            outcomes = [DONE] * len(words)
            left: list[int] = []
            for i, size in enumerate(sizes.tolist()):
                if size >= 0:
                    destinations[i].arrive(size)
                else:
                    left.append(i)
            if left:  # why have they not arrived?
                rest = [destinations[i] for i in left]
                for i, outcome in zip(
                    left, self._read_opened(peer, words[left], rest, verify), strict=True
                ):
                    outcomes[i] = outcome
            return outcomes
        except Unavailable:
            return [BY_ADDRESS] * len(words)

    def _read_opened(
        self, peer: Peer, words: np.ndarray, destinations: Sequence[Destination], verify: bool
    ) -> list[Outcome]:
        """``_read_inline``, where the destinations learn the sizes of the objects first."""
        offsets: list[int] = []
        sizes: list[int] = []
        compare = False
        for destination in destinations:
            offset, size = destination.wanted
            offsets.append(offset)
            sizes.append(size)
            compare |= verify and offset != WHOLE and not destination.was_compared
        starts, counts = np.array((offsets, sizes), np.uint64)
        answer = read_checked(
            self._peers.engine, peer, words, starts, counts, verify, compare, self._answer_s
        )
        if self._backoff.silent:
            self._backoff.heard(peer.name)
        outcomes: list[Outcome] = []
        places: list[Places] = []
        opened: list[int] = []
        is_right: list[bool] = []
        try:
            rows = zip(answer.statuses.tolist(), answer.object_bytes.tolist(), strict=True)
            for i, (status, object_bytes) in enumerate(rows):
                outcome, place = OUTCOMES[status], None
                if outcome is DONE or outcome is NOT_TAKEN:
                    place = destinations[i].open(object_bytes)  # it has a size now
                if place is None and outcome is DONE:
                    outcome = NOT_TAKEN
                elif outcome is DONE:
                    opened.append(i)
                outcomes.append(outcome)
                places.append(place or [])
            is_right = answer.receive(places, verify, self._read_s).tolist()
        finally:
            answer.close()
            for i in opened:
                if is_right and is_right[i]:
                    destinations[i].commit()
                else:
                    destinations[i].abort()
                    outcomes[i] = SPOILED
        return outcomes

    def _read_missing(
        self,
        words: np.ndarray,
        destinations: Sequence[Destination],
        pools: Holders,
        is_remembered: Sequence[bool],
        outcomes: list[Outcome],
        verify: bool,
    ) -> None:
        """Look once more for what was not found where it should be: it may have been moved
        meanwhile, also to this node, or its holder have been restarted.
        """
        left = [
            i
            for i, outcome in enumerate(outcomes)
            if pools[i] and outcome is not DONE and outcome is not NOT_TAKEN
        ]
        if not left:
            return
        if UNREACHED in outcomes:
            self._membership.refresh()
        found, _ = self._locations.find(words[left], anew=True)
        again = {
            i: names
            for i, names in zip(left, found, strict=True)
            if is_remembered[i] or outcomes[i] is UNREACHED or not set(names) <= set(pools[i])
        }
        indices = list(again)
        read = self.read_from(
            words[indices],
            [destinations[i] for i in indices],
            list(again.values()),
            verify=verify,
        )
        for i, outcome in zip(indices, read, strict=True):
            if outcome in (DONE, NOT_TAKEN, DAMAGED):
                outcomes[i] = outcome
        listed = {i: names for i, names in zip(left, found, strict=True) if outcomes[i] is ABSENT}
        self._wait_for_stored(words, destinations, listed, outcomes, verify)
        for i, names in zip(left, found, strict=True):
            if outcomes[i] in (ABSENT, UNREACHED):
                outcomes[i] = ABSENT
                if names and self._store is not None:
                    outcomes[i] = _read_here(self._store, words[i], destinations[i], verify)

    def _wait_for_stored(
        self,
        words: np.ndarray,
        destinations: Sequence[Destination],
        listed: Mapping[int, Sequence[str]],
        outcomes: list[Outcome],
        verify: bool,
    ) -> None:
        """Read what its holders do not have, as long as the directory lists it in their pools: it
        does so just before an object is stored. Of the others, the holders withdraw what they were
        told was missed.

        Args:
            words: ``[n, 2]``.
            destinations: n destinations.
            listed: which of them to read, and the pools that were named last.
            outcomes: n results, which are updated.
            verify: whether what has arrived is compared with its checksum.
        """
        serving = self._membership.serving  # not of this node's pool
        until, pause_s = time.monotonic() + STORED_S, PAUSE_S
        while left := [i for i, names in listed.items() if any(map(serving.get, names))]:
            if time.monotonic() > until:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_PAUSE_S)
            pools, _ = self._locations.find(words[left], anew=True)
            sinks = [destinations[i] for i in left]
            read = self.read_from(words[left], sinks, pools, verify=verify)
            listed = {}
            for i, names, outcome in zip(left, pools, read, strict=True):
                if outcome in (DONE, NOT_TAKEN, DAMAGED):
                    outcomes[i] = outcome
                elif outcome is ABSENT:
                    listed[i] = names


def _group(
    left: Sequence[int], holders: Sequence[Sequence[Member]], silent: set[str]
) -> list[Group]:
    """Which members to ask next, and for which objects."""
    groups: dict[str, Group] = {}
    for i in left:
        for member in holders[i]:
            if member.name not in silent:
                if member.name not in groups:
                    groups[member.name] = member, []
                groups[member.name][1].append(i)
                break
    return list(groups.values())


def _wait_for_all(reads: Sequence[Future[list[Outcome]]]) -> None:
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


def _read_here(store: Store, word: np.ndarray, destination: Destination, verify: bool) -> Outcome:
    """Read an object that has entered this node's pool since the pool was checked."""
    first, second = word.tolist()
    try:
        pinned = store.pin_key((first, second))
        if pinned is None:
            return ABSENT
        with pinned:
            if verify:
                pinned.verify()
            places = destination.open(pinned.num_bytes)
            if places is None:
                return NOT_TAKEN
            source = pinned.buffer
            if not source.is_host:
                source = as_buffer(copy_to_host([source]))
            offset = destination.wanted[0]
            at = source.address + (0 if offset == WHOLE else offset)
            for address, num_bytes in places:
                ctypes.memmove(address, at, num_bytes)
                at += num_bytes
    except ChecksumError:
        return DAMAGED
    destination.commit()
    return DONE
