"""How a node writes objects, into its pool or by having others take them, and removes them."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer, copy_to_host, parts_of
from mooncake_kernels.errors import InvalidArgument, TransferError, Unavailable
from mooncake_kernels.pool import PutResult, Retention
from mooncake_kernels.transfer import MAX_RPC_KEYS

from ..directory import Claim, Member
from ..keyspace import StoreKeys, words_of
from ..store import Store
from .claims import Guard
from .membership import preference
from .node import Node
from .node_client import UNSURE, NewResult, Pulls
from .put import NORMAL, PUT_OPTIONS, ClusterPut, LocalPut, PutBatch, StagedPut, put_arguments
from .reads import GONE, BufferDestination, Reads

Result = TypeVar("Result")

DIRECT_S = 0.1  # for which a claimant waits for a direct put that its claim ends
PAUSE_S = 0.001
MAX_PUT_BYTES = 4 << 20  # above, asking whether they exist costs little compared with sending them
UNSURE_S = 5.0  # for which a put waits until what is listed to no effect is withdrawn
BEING_WRITTEN = PutResult.BEING_WRITTEN
BEGUN = {PutResult.EXISTS.value: PutResult.EXISTS}  # by ``ObjectPuts.states``
RESULT_OF = {Claim.EXISTS: PutResult.EXISTS, Claim.TAKEN: PutResult.BEING_WRITTEN}


class Writes:
    """Puts of a ``ClusterStore``, each object once in all hosts, and removals. Thread-safe.

    Args:
        node: of this process.
        reads: of the same store.
        verify: whether what others have taken is compared with what is here.
        claim_s: how long a put may take, at most, before another node may write the same key.
    """

    def __init__(self, node: Node, reads: Reads, *, verify: bool, claim_s: float):
        self._node = node
        self._store = node.store
        self._reads = reads
        self._verify = verify
        self._claim_s = claim_s

    def put_each(self, batch: PutBatch, preferred: Sequence[str]) -> list[PutResult]:
        """Store objects; a key that is named twice once.

        Args:
            batch: n of them.
            preferred: who takes them.
        """
        results = self._put_all(batch, preferred)
        if BEING_WRITTEN in results:
            first: dict[bytes, int] = {}
            for i, word in enumerate(words_of(batch.words)):
                if first.setdefault(word, i) < i and results[i] is BEING_WRITTEN:  # by this put
                    result = results[first[word]]
                    results[i] = PutResult.EXISTS if result is PutResult.STORED else result
        return results

    def _put_all(self, batch: PutBatch, preferred: Sequence[str]) -> list[PutResult]:
        """Store objects: in one round trip if possible, or else after they have been claimed."""
        node, store = self._node, self._store
        node.claims.settle_dropped()
        homes = self._preferred_homes(preferred) if preferred else []
        direct: list[NewResult] | None = None
        if store is None or homes:
            direct = self._put_at(homes, batch)
        else:
            with node.admission.enter():
                if node.admission.is_open:
                    direct = self._put_here(store, batch)
        if direct is None:
            return self._put_claimed(batch, preferred)
        results: list[PutResult] = []
        left = []
        for i, result in enumerate(direct):
            if isinstance(result, PutResult):
                results.append(result)
            else:
                results.append(PutResult.EXISTS)
                left.append(i)
        if not left:
            return results
        is_mixed = len(left) < len(results)
        until = time.monotonic() + UNSURE_S
        while left:
            rest = self._put_claimed(batch.at(left), preferred)
            for i, result in zip(left, rest, strict=True):
                results[i] = result
            left = self._find_unsure(batch.words, direct, results)
            if left and time.monotonic() > until:
                raise Unavailable("put: the directory lists an object that cannot be found")
            if left:
                time.sleep(PAUSE_S)
        if store is not None and is_mixed:  # each way has ordered only its own
            store.age_tail_first(batch.words[_which(results, PutResult.STORED)])
        return results

    def begin_each(
        self,
        op: str,
        keys: StoreKeys,
        words: np.ndarray,
        num_bytes: Sequence[int],
        options: np.ndarray,
        preferred: Sequence[str],
    ) -> list[ClusterPut | PutResult]:
        """Reserve space for many objects, see ``ClusterStore.begin_each``.

        Args:
            op: the call.
            keys: n of them.
            words: ``[n, 2]``: the same in the pool.
            num_bytes: n sizes.
            options: ``[n]`` of ``PUT_OPTIONS``: how they are kept.
            preferred: who takes them.
        """
        self._node.claims.settle_dropped()
        is_here = self._store is not None and not self._preferred_homes(preferred)
        with self._node.admission.enter(), (guard := Guard()):
            if self._store is not None and self._node.admission.is_open:
                self._store.check_puts(op, keys)
                if is_here:
                    return self._begin_each_here(guard, words, num_bytes, options)
                for size in num_bytes:  # the pool must be able to take what others do not
                    self._store.check_size(op, "num_bytes", size)
        return self._begin_staged(keys, words, num_bytes, options, preferred)

    def commit_each(self, puts: Sequence[ClusterPut]) -> list[PutResult]:
        """Commit the puts that ``begin_each`` returned, see ``ClusterStore.commit_each``."""
        if not self._node.is_open:
            raise self._node.not_open()
        self._check_puts(puts)
        here = [put for put in puts if isinstance(put, LocalPut)]
        self._renew_claims(here)
        stored: list[np.ndarray] = []
        try:
            for put in here:
                if put.is_open:
                    put.store()
                    stored.append(put.word)
        finally:
            if stored:
                self._node.claims.settle(np.concatenate(stored))
        if staged := [put for put in puts if isinstance(put, StagedPut)]:
            for preferred in dict.fromkeys(put.preferred for put in staged):
                self._send([put for put in staged if put.preferred == preferred], preferred)
        return [put.result for put in puts if put.result is not None]

    def remove_each(self, words: np.ndarray) -> np.ndarray:
        """Remove ``[n, 2]`` objects everywhere, see ``ClusterStore.remove_each``."""
        node = self._node
        unreached: list[str] = []
        try:
            pools = node.entries.remove(words)
        except Unavailable:
            self._remove_here(words, unreached)
            raise
        removed = self._remove_here(words, unreached)
        others: dict[str, list[int]] = {}
        for i, names in enumerate(pools):
            for name in names:
                if name != node.pool_name:
                    others.setdefault(name, []).append(i)
        for pool in sorted(others):
            held = others[pool]
            try:
                removed[held] |= self._remove_from(pool, words[held])
            except (TransferError, Unavailable) as error:
                node.entries.publish_for(pool, words[held])  # where they may still be
                unreached.append(str(error))
        node.locations.forget(words)
        if unreached:
            raise Unavailable(f"remove: it is not removed everywhere: {'; '.join(unreached)}")
        return removed

    def retain(self, word: np.ndarray, retention: Retention) -> bool:
        """Set how long an object, ``[1, 2]``, shall stay, see ``ClusterStore.retain``."""
        found = False
        if self._store is not None:
            first, second = word[0].tolist()
            found = self._store.pool.retain((first, second), retention)
        unreached: list[str] = []
        for pool in sorted(set(self._node.entries.holders(word)[0]) - {self._node.pool_name}):
            try:
                found |= self._retain_in(pool, word, retention)
            except TransferError as error:
                unreached.append(str(error))
        if unreached:
            raise Unavailable(f"retain: it is not set everywhere: {'; '.join(unreached)}")
        return found

    def homes(self) -> list[Member]:
        """Members whose pools take objects, without this node's: those that were silent lately
        last, and of the others the emptiest pool first.
        """
        membership = self._node.membership
        if not membership.homes:
            membership.refresh()
        return sorted(membership.homes, key=lambda member: member in self._node.backoff)

    def _put_here(self, store: Store, batch: PutBatch) -> list[NewResult] | None:
        """Put n objects into this node's pool, in one round trip to the directory.

        They are copied first. Then the directory lists those that no one else has or writes, and
        these become visible. What others have is copied to no effect: so this is for few bytes, and
        for objects that are probably new. Nothing is evicted. The rest is left to puts under
        claims.

        Returns:
            For each ``STORED``; ``EXISTS`` here; None: it is to be put another way; ``UNSURE``:
            likewise, and it may be listed. None instead of a list: all are, since that cannot be
            done here now, is probably to no effect, or there is no room.

        Raises:
            Unavailable: the directory does not answer; objects may be listed, and are not stored.
            Whatever a put does; some may be stored.
        """
        node = self._node
        words, objects, options = batch
        publisher = node.publisher
        if publisher is None or not 0 < len(words) <= MAX_RPC_KEYS:
            return None
        parts, counts, num_bytes = parts_of(objects)
        if num_bytes > MAX_PUT_BYTES or node.locations.knows_any(words):
            return None
        begun = store.begin_keys(words, parts, counts, options["retention"], options["position"])
        if begun is None:
            return None
        with begun:
            results: list[NewResult] = [BEGUN.get(state) for state in begun.states]
            asked = begun.ids.nonzero()[0]
            if not len(asked):
                return results
            try:
                listed = publisher.publish(words[asked])
                if listed is not None:
                    asked = asked[listed]
                    begun.commit(asked)
            except BaseException:
                node.entries.is_stale = True  # what it lists may not be there
                raise
        if listed is None:
            node.entries.is_stale = True
            if publisher.is_late:  # so would be the answer to a claim
                raise Unavailable("put: the directory does not answer in time")
            for i in asked.tolist():
                results[i] = UNSURE
            return results
        for i in asked.tolist():
            results[i] = PutResult.STORED
        node.entries.note_listed(words[asked], begun.ids[asked])
        store.age_tail_first(words[asked])
        return results

    def _put_at(self, homes: Sequence[Member], batch: PutBatch) -> list[NewResult] | None:
        """Put n objects into another pool, if its node's engine also publishes them, and none of
        them is known to be somewhere. Objects that others have, or are writing, are not stored.

        No one is asked beforehand, so it is for few bytes: they may be sent to no effect.

        Args:
            homes: of which the first takes them; none: the emptiest pool does.
            batch: n objects.

        Returns:
            For each ``STORED``; ``BEING_WRITTEN`` by another writer; None: it is to be put another
            way, which also finds out why; ``UNSURE``: likewise, but it may be listed without being
            anywhere. None instead of a list: all are to be put another way.
        """
        node = self._node
        words, objects, options = batch
        member = next(iter(homes or node.membership.homes), None)
        if member is None or not member.publishes or not 0 < len(words) <= MAX_RPC_KEYS:
            return None
        if (options["retention"] != NORMAL).any() or (homes and self._reads.are_here(words).any()):
            return None
        places, num_bytes = [], 0
        for parts in objects:
            place = []
            for part in parts:
                if not part.is_host:
                    return None
                num_bytes += part.num_bytes
                place.append((part.address, part.num_bytes))
            places.append(place)
        if num_bytes > min(MAX_PUT_BYTES, member.free_bytes) or member in node.backoff:
            return None
        if node.locations.knows_any(words):
            return None
        try:
            return node.client.put_new(member.name, words, places, num_bytes, verify=self._verify)
        except TransferError as error:
            node.backoff.failed(member, error)
            return None

    def _find_unsure(
        self, words: np.ndarray, direct: Sequence[NewResult], results: Sequence[PutResult]
    ) -> list[int]:
        """Which objects are said to exist only because an engine listed them to no effect. Whoever
        was asked for such an object withdraws it.
        """
        unsure = [
            i
            for i, result in enumerate(results)
            if direct[i] == UNSURE and result is PutResult.EXISTS
        ]
        if not unsure:
            return []
        self._node.locations.forget(words[unsure])
        nothing = [BufferDestination("put", [], 0) for _ in unsure]
        outcomes = self._reads.read_each(words[unsure], nothing, verify=self._verify)
        return [i for i, outcome in zip(unsure, outcomes, strict=True) if outcome in GONE]

    def _put_claimed(self, batch: PutBatch, preferred: Sequence[str]) -> list[PutResult]:
        """Store objects, after they have been claimed: there, or else here or elsewhere."""
        with (guard := Guard()):
            results = self._put_under(guard, batch, preferred)
        taken = _which(results, BEING_WRITTEN)
        if taken:
            for i, is_here in zip(taken, self._reads.are_here(batch.words[taken]), strict=True):
                if is_here:  # by now
                    results[i] = PutResult.EXISTS
        return results

    def _put_under(
        self, guard: Guard, batch: PutBatch, preferred: Sequence[str]
    ) -> list[PutResult]:
        """Claim objects, store those that are granted, and settle their claims."""
        words, objects, options = batch
        results, granted = self._claim(words, guard)
        published = np.zeros(len(words), bool)
        left = granted
        try:
            if homes := self._preferred_homes(preferred):  # one may have been silent just now
                left, *_ = self._offer(homes, batch, granted, results, published)
            with self._node.admission.enter():
                is_in = self._node.admission.is_open
                if self._store is not None and is_in:
                    for i in left:
                        word = int(words[i, 0]), int(words[i, 1])
                        put = partial(
                            self._store.put_key, word, *objects[i], **put_arguments(options[i])
                        )
                        results[i] = _under_claim(put)
                    new = [i for i in left if results[i] is PutResult.STORED]
                    self._store.age_tail_first(words[new])
            if left and (self._store is None or not is_in):
                _, unanswered, reason = self._offer(self.homes(), batch, left, results, published)
                if unanswered:
                    raise Unavailable(f"put: no node with a pool takes it: {reason}")
        finally:
            self._node.claims.settle(words[granted], published[granted])
        return results

    def _claim(self, words: np.ndarray, guard: Guard) -> tuple[list[PutResult], list[int]]:
        """Claim the keys that are not here. Return the result of each key, and which were granted:
        these must be settled, and are ``FULL`` until there is more to say about them.
        """
        results = [PutResult.EXISTS] * len(words)
        missing = np.flatnonzero(~self._reads.are_here(words))
        claims = self._node.claims.ask(words[missing], self._claim_s, guard)
        for i, claim in zip(missing.tolist(), claims.tolist(), strict=True):
            results[i] = RESULT_OF.get(claim, PutResult.FULL)
        return results, missing[claims == Claim.GRANTED].tolist()

    def _offer(
        self,
        homes: Sequence[Member],
        batch: PutBatch,
        granted: list[int],
        results: list[PutResult],
        published: np.ndarray,
    ) -> tuple[list[int], set[int], str]:
        """Have others take objects; if a node cannot, the next one is asked.

        Returns:
            Which objects none of them has taken; for which of these none has answered; and why.
        """
        objects = list(batch.objects)
        for i in granted:
            objects[i] = [_in_host(part) for part in objects[i]]
        batch = batch._replace(objects=objects)
        left, unanswered, reason = list(granted), set(granted), "there is none"
        for member in homes:
            if not left:
                break
            try:
                answers = self._give_to(member, batch.at(left))
            except TransferError as error:
                self._node.backoff.failed(member, error)
                reason = str(error)
                continue
            for i, answer in zip(list(left), answers, strict=True):
                if isinstance(answer, str):
                    reason = answer
                    continue
                results[i] = answer
                unanswered.discard(i)
                published[i] = answer is PutResult.STORED
                if answer not in (PutResult.FULL, PutResult.OVER_QUOTA):
                    left.remove(i)
        return left, unanswered, reason

    def _give_to(self, member: Member, batch: PutBatch) -> Pulls:
        """Have one node take objects, and ensure that they are published: those that its engine has
        stored. What exists there and is not listed may be about to be removed: its node says, and
        lists it.
        """
        verify = self._verify
        asking = self._node.client
        answers: list[PutResult | str | None] = list(asking.put(member.name, batch, verify=verify))
        until = time.monotonic() + DIRECT_S
        while again := [i for i, answer in enumerate(answers) if answer is BEING_WRITTEN]:
            if time.monotonic() > until:
                break
            time.sleep(PAUSE_S)
            results = asking.put(member.name, batch.at(again), verify=verify)
            for i, result in zip(again, results, strict=True):
                answers[i] = result
        stored = [i for i, answer in enumerate(answers) if answer is PutResult.STORED]
        if not self._node.entries.publish_for(member.pool, batch.words[stored]):
            for i in stored:
                answers[i] = f"{member.pool} has left"
        if left := [i for i, answer in enumerate(answers) if answer in (None, PutResult.EXISTS)]:
            taken = asking.give(member.name, batch.at(left), self._node.name, verify=verify)
            for i, answer in zip(left, taken, strict=True):
                answers[i] = answer
        return [answer for answer in answers if answer is not None]

    def _preferred_homes(self, preferred: Sequence[str]) -> list[Member]:
        """Members whose pools are asked before the usual place takes an object: those that are
        preferred, and more than this node, the best first. Not those that were silent lately.
        """
        if not preferred:
            return []
        bound = len(preferred)
        if self._store is not None and not self._node.is_draining:
            for member in self._node.members():
                if member.pool == self._node.pool_name:
                    bound = min(bound, preference(member, preferred))
        ranks = [(preference(member, preferred), member) for member in self._node.membership.homes]
        wanted = [
            (rank, member)
            for rank, member in ranks
            if rank < bound and member not in self._node.backoff
        ]
        return [member for _, member in sorted(wanted, key=lambda one: one[0])]

    def _begin_each_here(
        self,
        guard: Guard,
        words: np.ndarray,
        num_bytes: Sequence[int],
        options: np.ndarray,
    ) -> list[ClusterPut | PutResult]:
        """Reserve space for many objects in this node's pool."""
        claimed_s = time.monotonic()
        claimed, granted = self._claim(words, guard)
        results: list[ClusterPut | PutResult] = [*claimed]
        try:
            for i in granted:
                results[i] = self._begin_here(words[[i]], num_bytes[i], claimed_s, options[i])
        except BaseException:
            try:
                for put in results:
                    if isinstance(put, LocalPut):
                        put.give_up()
            finally:  # also of one that could not be given up: it is dropped
                self._node.claims.settle(words[granted])
            raise
        refused = [i for i in granted if isinstance(results[i], PutResult)]
        if refused:
            self._node.claims.settle(words[refused])
        return results

    def _begin_here(
        self, word: np.ndarray, num_bytes: int, claimed_s: float, options: np.void
    ) -> ClusterPut | PutResult:
        """Reserve space in this node's pool, under a granted claim."""
        assert self._store is not None
        first, second = word[0].tolist()
        begin = partial(self._store.begin_key, (first, second), num_bytes)
        begun = _under_claim(partial(begin, **put_arguments(options)))
        if isinstance(begun, PutResult):
            return begun
        return LocalPut(
            word,
            begun,
            claimed_s,
            self,
            partial(self._node.claims.settle, word),
            self._node.claims.keep(word),
        )

    def _begin_staged(
        self,
        keys: StoreKeys,
        words: np.ndarray,
        num_bytes: Sequence[int],
        options: np.ndarray,
        preferred: Sequence[str],
    ) -> list[ClusterPut | PutResult]:
        """Reserve memory of this process for objects."""
        is_there = self._reads.exist(words)
        homes = [] if is_there.all() else self.homes()
        if not homes and not is_there.all():
            raise Unavailable("begin: no node with a pool takes it: there is none")
        largest = max([member.capacity_bytes for member in homes], default=0)
        if self._store is not None and self._node.admission.is_open:  # it takes what others do not
            largest = max(largest, self._store.pool.capacity_bytes)
        results: list[ClusterPut | PutResult] = []
        begun: set[bytes] = set()
        for i, word in enumerate(words_of(words)):
            key, size = keys[i], num_bytes[i]
            if is_there[i]:
                results.append(PutResult.EXISTS)
            elif word in begun:
                results.append(BEING_WRITTEN)
            elif size > largest:
                results.append(PutResult.FULL)
            else:
                begun.add(word)
                results.append(StagedPut(key, words[[i]], size, options[i], preferred, self))
        return results

    def _send(self, puts: Sequence[StagedPut], preferred: Sequence[str]) -> None:
        """Put what was written in memory of this process."""
        for put in puts:
            put.end()
        if self._store is not None:
            self._store.check_puts("commit_each", [put.key for put in puts])
        batch = PutBatch(
            np.concatenate([put.word for put in puts]),
            [(as_buffer(put.bytes),) for put in puts],
            np.array([put.options for put in puts], PUT_OPTIONS),
        )
        results = self.put_each(batch, preferred)
        for put, result in zip(puts, results, strict=True):
            put.end(result)

    def _check_puts(self, puts: Sequence[ClusterPut]) -> None:
        """Refuse puts that are not this store's, or not open any more."""
        if isinstance(puts, str | bytes) or not isinstance(puts, Sequence):
            raise InvalidArgument(f"commit_each: puts must be a sequence, got {puts!r:.80}")
        if len(set(map(id, puts))) < len(puts):
            raise InvalidArgument("commit_each: puts must be different ones, got one of them twice")
        for put in puts:
            if not isinstance(put, ClusterPut) or put.owner is not self:
                raise InvalidArgument(
                    f"commit_each: puts must be what this store has begun, got {put!r:.80}"
                )
            put.check_open("commit")

    def _renew_claims(self, puts: Sequence[LocalPut]) -> None:
        """Renew claims that may have run out; give up puts whose objects others have by now."""
        late = time.monotonic() - self._claim_s / 2
        if not (old := [put for put in puts if put.claimed_s < late]):
            return
        words = np.concatenate([put.word for put in old])
        claims = self._node.claims.renew(words, self._claim_s)
        for put, claim in zip(old, claims.tolist(), strict=True):
            if claim != Claim.GRANTED:
                put.give_up(RESULT_OF[claim])
        if (lost := claims != Claim.GRANTED).any():
            self._node.claims.settle(words[lost])

    def _remove_here(self, words: np.ndarray, unreached: list[str]) -> np.ndarray:
        """Remove objects from this node's pool: ``[n]`` bool, which were there. Objects that cannot
        be removed are published again.
        """
        store, entries = self._store, self._node.entries
        if store is None:
            return np.zeros(len(words), bool)
        if store.is_pool_all:
            try:
                return store.remove_keys(words)
            except (Unavailable, OSError) as error:  # a stopped process holds the pool
                unreached.append(str(error))
                entries.publish(words)
                return np.zeros(len(words), bool)
        removed = np.zeros(len(words), bool)
        for i, (first, second) in enumerate(words.tolist()):
            try:
                removed[i] = store.remove_key((first, second))
            except (Unavailable, OSError) as error:  # or the disk cannot be written
                unreached.append(str(error))
                entries.publish(words[[i]])
        return removed

    def _remove_from(self, pool: str, words: np.ndarray) -> np.ndarray:
        """Have a pool's nodes remove objects: ``[n]`` bool, which were there. All its nodes are
        asked, since one may have a disk behind it.
        """
        removed = np.zeros(len(words), bool)
        failures: list[TransferError] = []
        members = self._servers_of(pool)
        for member in members:
            try:
                removed |= self._node.client.remove(member.name, words)
            except TransferError as error:
                failures.append(error)
        if members and len(failures) == len(members):
            raise failures[0]
        return removed

    def _servers_of(self, pool: str) -> list[Member]:
        """The members that serve another node's pool; the directory is asked if none is known.

        Raises:
            Unavailable: it is asked, and does not answer.
        """
        membership = self._node.membership
        if pool not in membership.serving:
            membership.refresh()
        return membership.serving.get(pool, [])

    def _retain_in(self, pool: str, key: np.ndarray, retention: Retention) -> bool:
        """Have one of a pool's nodes keep an object so long; returns whether the pool has it."""
        failure: TransferError | None = None
        for member in self._servers_of(pool):
            try:
                return self._node.client.retain(member.name, key, retention)
            except TransferError as error:
                failure = error
        if failure is not None:
            raise failure
        return False


def _which(results: Sequence[NewResult], wanted: PutResult) -> list[int]:
    return [i for i, result in enumerate(results) if result is wanted]


def _under_claim(put: Callable[[], Result]) -> Result:
    """Return what a put does under a granted claim. A direct put of the same object that began
    before is refused because of the claim: its end is waited for.
    """
    until = time.monotonic() + DIRECT_S
    while (result := put()) is BEING_WRITTEN and time.monotonic() < until:
        time.sleep(PAUSE_S)
    return result


def _in_host(buffer: Buffer) -> Buffer:
    """Memory that can be sent: a copy of what is on a GPU."""
    return buffer if buffer.is_host else as_buffer(copy_to_host([buffer]))
