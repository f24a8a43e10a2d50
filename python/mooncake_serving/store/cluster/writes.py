"""The half of ``ClusterStore`` that writes objects."""

import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer
from mooncake_kernels.errors import InvalidArgument, Unavailable
from mooncake_kernels.pool import PutResult, Retention

from ..checks import check_number, check_pairs, check_retention
from ..directory import Claim
from ..keyspace import StoreKey, StoreKeys
from ..store import Store
from .cluster_giver import BEING_WRITTEN, DIRECT_S, PAUSE_S, ClusterGiver
from .destinations import BufferDestination
from .guards import Guard
from .membership import check_preferred
from .object_rpc import UNSURE, NewResult
from .put import ClusterPut, LocalPut, StagedPut
from .reads import GONE
from .retention import NORMAL, PUT_OPTIONS, prompt_options, put_arguments

Result = TypeVar("Result")

UNSURE_S = 5.0  # for which a put waits until what is listed in vain is withdrawn
RESULT_OF = {Claim.EXISTS: PutResult.EXISTS, Claim.TAKEN: PutResult.BEING_WRITTEN}


class ClusterWriter(ClusterGiver):
    """Writes into this node's pool, or has others take it; each object once in all hosts."""

    _claim_s: float

    def put(
        self,
        key: StoreKey,
        value: Any,
        *,
        retention: Retention = "normal",
        position: int = 0,
        preferred: Sequence[str] = (),
    ) -> PutResult:
        """Store a value: bytes, a packed tensor or array. See ``put_from``."""
        words = self._keyspace.row(key, "put")
        named = "put", "value", ""
        return self._put_named(*named, [key], words, [(value,)], retention, position, preferred)[0]

    def put_from(
        self,
        key: StoreKey,
        *parts: Any,
        retention: Retention = "normal",
        position: int = 0,
        preferred: Sequence[str] = (),
    ) -> PutResult:
        """Store an object of one or many parts; its bytes are the parts in order.

        It is put into this node's pool. A node that has none, or is draining, has another node take
        it out of its memory, which is registered meanwhile. If the other node's engine takes it by
        itself, ``position`` is 0 there; with a ``retention`` it does not.

        Args:
            key: of the object.
            parts: of it, in order.
            retention: see ``Store.put_from``.
            position: likewise.
            preferred: names of members, or hosts, the best first, as in ``Placement``: those before
                this node take it first, into pools that evict for it as for any put. What none of
                them takes, because it is full, draining, silent or unknown, goes where it would
                without them. It is ignored for an object that exists.

        Returns:
            As ``Store.put_from``, of all hosts. ``STORED`` also if the directory went away after it
            has granted a claim: then it is told later.

        Raises:
            InvalidArgument: as ``Store.put_from``.
            Unavailable: it is not here, and the directory does not answer; or, without a pool, no
                other node takes it.
        """
        words = self._keyspace.row(key, "put_from")
        named = "put_from", "parts", "[{}]"
        return self._put_named(*named, [key], words, [parts], retention, position, preferred)[0]

    def begin(
        self,
        key: StoreKey,
        num_bytes: int,
        *,
        retention: Retention = "normal",
        position: int = 0,
        preferred: Sequence[str] = (),
    ) -> ClusterPut | PutResult:
        """Reserve space for an object that is written in place, layer by layer for example::

            put = cluster.begin(key, sum(layer.nbytes for layer in layers))
            if isinstance(put, PutResult):
                return  # EXISTS somewhere, BEING_WRITTEN by somebody else, or FULL
            with put:
                put.view[first:last] = layer  # each as it comes; or put.buffer, if it is on a GPU

        The space is in this node's pool, and this node has the exclusive right to write the key for
        ``claim_s``; a put that takes longer may lose to another node, which the commit detects. On
        a node that has no pool, or is draining, or if another is preferred (see ``put_from``), the
        object is written in memory of the process, and another node is asked to take it at the
        commit.

        Returns:
            A put to be committed; or a result as of ``put_from`` that says why there is none.

        Raises:
            InvalidArgument: as ``Store.begin``.
            Unavailable: the directory does not answer; or no other node with a pool is known.
        """
        self._keyspace.key(key, "begin")
        check_number("begin", "num_bytes", num_bytes)
        return self._begin_each("begin", [key], [num_bytes], retention, position, preferred)[0]

    def begin_each(
        self,
        keys: StoreKeys,
        num_bytes: Sequence[int],
        *,
        retention: Retention = "normal",
        position: int = 0,
        preferred: Sequence[str] = (),
    ) -> list[ClusterPut | PutResult]:
        """Reserve space for many objects, see ``begin``; the directory is asked once.

        On an error nothing is reserved.
        """
        check_pairs("begin_each", "num_bytes", keys, num_bytes)
        for i, size in enumerate(num_bytes):
            check_number("begin_each", f"num_bytes[{i}]", size)
        return self._begin_each("begin_each", keys, num_bytes, retention, position, preferred)

    def _begin_each(
        self,
        op: str,
        keys: StoreKeys,
        num_bytes: Sequence[int],
        retention: Retention,
        position: int,
        preferred: Sequence[str],
    ) -> list[ClusterPut | PutResult]:
        self.node.check_process()
        check_retention(op, retention)
        check_number(op, "position", position)
        if preferred != ():
            check_preferred(op, preferred)
        self.node.claims.settle_dropped()
        is_here = self._store is not None and not self._preferred_homes(preferred)
        with self.node.admission.enter(), (guard := Guard()):
            if self._store is not None and self.node.admission.is_open:
                self._store.check_puts(op, keys)
                if is_here:
                    words = self._keyspace.keys(keys, op)
                    return self._begin_each_here(guard, words, num_bytes, retention, position)
                for size in num_bytes:  # the pool must be able to take what others do not
                    self._store.check_size(op, "num_bytes", size)
        options = prompt_options(len(keys), retention, position)
        return self._begin_staged(keys, num_bytes, options, preferred)

    def commit_each(self, puts: Sequence[ClusterPut]) -> list[PutResult]:
        """Commit the puts that ``begin_each`` returned, see ``ClusterPut.commit``; the directory is
        told once.

        An error ends the call: puts committed before it are visible, the rest are still open.
        """
        self.node.check_process()
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
                self.node.claims.settle(np.concatenate(stored))
        if elsewhere := [put for put in puts if isinstance(put, StagedPut)]:
            for preferred in dict.fromkeys(sent.preferred for sent in elsewhere):
                self._send([sent for sent in elsewhere if sent.preferred == preferred], preferred)
        return [put.result for put in puts if put.result is not None]

    def _send(self, puts: Sequence[StagedPut], preferred: Sequence[str]) -> None:
        """Put what was written in memory of this process."""
        for put in puts:
            put.end()
        keys = [put.key for put in puts]
        options = np.array([put.options for put in puts], PUT_OPTIONS)
        results = self._put_each(
            "commit_each",
            keys,
            self._keyspace.keys(keys, "commit_each"),
            [(as_buffer(put.bytes),) for put in puts],
            lambda: options,
            bool((options["retention"] == NORMAL).all()),
            preferred,
        )
        for put, result in zip(puts, results, strict=True):
            put.end(result)

    def put_each(
        self,
        keys: StoreKeys,
        values: Sequence[Any],
        *,
        position: int = 0,
        preferred: Sequence[str] = (),
    ) -> list[PutResult]:
        """Store many objects, in their order; the directory is asked and told once.

        An error ends the call: later objects are not stored.

        Raises:
            InvalidArgument: an argument is wrong, or a value is larger than this node's pool;
                nothing was stored.
        """
        check_pairs("put_each", "values", keys, values)
        words = self._keyspace.keys(keys, "put_each")
        objects = [(value,) for value in values]
        named = "put_each", "values[{}]", ""
        return self._put_named(*named, keys, words, objects, "normal", position, preferred)

    def put_from_each(
        self,
        keys: StoreKeys,
        objects: Sequence[Sequence[Any]],
        *,
        retention: Retention = "normal",
        position: int = 0,
        preferred: Sequence[str] = (),
    ) -> list[PutResult]:
        """``put_each`` of objects of many parts, see ``put_from``.

        Args:
            keys: n of them.
            objects: n, each a sequence of its parts.
            retention: of all of them.
            position: of the first.
            preferred: who takes them, see ``put_from``.
        """
        check_pairs("put_from_each", "objects", keys, objects)
        for i, parts in enumerate(objects):
            if not isinstance(parts, Iterable):
                raise InvalidArgument(
                    f"put_from_each: objects[{i}] must be a sequence of parts, got {parts!r:.80}"
                )
        words = self._keyspace.keys(keys, "put_from_each")
        named = "put_from_each", "objects[{}]", "[{}]"
        return self._put_named(*named, keys, words, objects, retention, position, preferred)

    def _put_named(
        self,
        op: str,
        whole: str,
        part: str,
        keys: StoreKeys,
        words: np.ndarray,
        objects: Sequence[Sequence[Any]],
        retention: Retention,
        position: int,
        preferred: Sequence[str],
    ) -> list[PutResult]:
        """Store many objects.

        Args:
            op: the call.
            whole: its name of an object, with ``{}`` for the index.
            part: what follows in the name of a part of it, with ``{}`` for the index.
            keys: n of them.
            words: ``[n, 2]``: the same in the pool.
            objects: n of them.
            retention: of all of them.
            position: of the first.
            preferred: who takes them.
        """
        self.node.check_process()
        check_retention(op, retention)
        check_number(op, "position", position)
        if preferred != ():
            check_preferred(op, preferred)
        buffers = [
            self._as_buffers(op, whole.format(i), part, parts) for i, parts in enumerate(objects)
        ]
        is_normal = retention == "normal"
        return self._put_each(
            op,
            keys,
            words,
            buffers,
            lambda: prompt_options(len(keys), retention, position),
            is_normal,
            preferred,
        )

    def _as_buffers(self, op: str, whole: str, part: str, parts: Sequence[Any]) -> list[Buffer]:
        """The memory of an object's parts, which must fit into the pool if it is put here."""
        begin = f"{op}: {whole}"
        buffers = [
            as_buffer(memory, argument=begin + part.format(j)) for j, memory in enumerate(parts)
        ]
        if self._store is not None and not self.node.is_draining:
            self._store.check_size(op, whole, sum(buffer.num_bytes for buffer in buffers))
        return buffers

    def _put_each(
        self,
        op: str,
        keys: StoreKeys,
        words: np.ndarray,
        objects: Sequence[Sequence[Buffer]],
        make_options: Callable[[], np.ndarray],
        is_normal: bool,
        preferred: Sequence[str],
    ) -> list[PutResult]:
        """Store many objects: directly, or after they have been claimed.

        Args:
            op: the call.
            keys: n of them.
            words: ``[n, 2]``: the same in the pool.
            objects: n of them.
            make_options: returns ``[n]`` of ``PUT_OPTIONS``: how they are kept.
            is_normal: whether all have the retention "normal".
            preferred: who takes them.
        """
        self.node.claims.settle_dropped()
        homes = self._preferred_homes(preferred) if preferred else []
        direct: list[NewResult] | None = None
        if (store := self._store) is not None:
            store.check_puts(op, keys)
        if store is not None and not homes:
            direct = self._put_listed(store, words, objects, make_options)
        elif is_normal and not (homes and self._are_here(words).any()):
            home = homes[0] if homes else None
            direct = self.node.fast_path.put(words, objects, home, verify=self._verify > 0)
        if direct is None:
            return self._put_claimed(words, objects, make_options(), preferred)
        results = [r if isinstance(r, PutResult) else PutResult.EXISTS for r in direct]
        left = [i for i, result in enumerate(direct) if not isinstance(result, PutResult)]
        if not left:
            return results
        is_mixed = len(left) < len(words)
        until = time.monotonic() + UNSURE_S
        while left:
            options = make_options()[left]
            rest = self._put_claimed(words[left], [objects[i] for i in left], options, preferred)
            for i, result in zip(left, rest, strict=True):
                results[i] = result
            left = self._find_unsure(words, direct, results)
            if left and time.monotonic() > until:
                raise Unavailable("put: the directory lists an object that cannot be found")
            if left:
                time.sleep(PAUSE_S)
        if store is not None and is_mixed:  # each way has ordered only its own
            store.age_tail_first(words[_which(results, PutResult.STORED)])
        return results

    def _put_listed(
        self,
        store: Store,
        words: np.ndarray,
        objects: Sequence[Sequence[Buffer]],
        make_options: Callable[[], np.ndarray],
    ) -> list[NewResult] | None:
        """Put many objects into this node's pool in one round trip, see ``FastPath.put_here``."""
        results = None
        with self.node.admission.enter():
            if self.node.admission.is_open:
                results = self.node.fast_path.put_here(words, objects, make_options)
        if results is not None:
            store.age_tail_first(words[_which(results, PutResult.STORED)])
        return results

    def _find_unsure(
        self, words: np.ndarray, direct: Sequence[NewResult], results: Sequence[PutResult]
    ) -> list[int]:
        """Which objects are said to exist only because an engine listed them in vain. Whoever was
        asked for such an object withdraws it.
        """
        unsure = [
            i
            for i, result in enumerate(results)
            if direct[i] == UNSURE and result is PutResult.EXISTS
        ]
        if not unsure:
            return []
        self.node.locations.forget(words[unsure])
        nothing = [BufferDestination("put", [], 0) for _ in unsure]
        outcomes = self.read_each(words[unsure], nothing)
        return [i for i, outcome in zip(unsure, outcomes, strict=True) if outcome in GONE]

    def _put_claimed(
        self,
        words: np.ndarray,
        objects: Sequence[Sequence[Buffer]],
        options: np.ndarray,
        preferred: Sequence[str],
    ) -> list[PutResult]:
        """Store many objects, after they have been claimed: there, or else here or elsewhere."""
        with (guard := Guard()):
            results = self._put_under(guard, words, objects, options, preferred)
        taken = _which(results, PutResult.BEING_WRITTEN)
        if taken:
            for i, is_here in zip(taken, self._are_here(words[taken]), strict=True):
                if is_here:  # by now, as where a key is named twice
                    results[i] = PutResult.EXISTS
        return results

    def _put_under(
        self,
        guard: Guard,
        words: np.ndarray,
        objects: Sequence[Sequence[Buffer]],
        options: np.ndarray,
        preferred: Sequence[str],
    ) -> list[PutResult]:
        """Claim objects, store those that are granted, and settle their claims."""
        results, granted = self._claim(words, guard)
        published = np.zeros(len(words), bool)
        left = granted
        try:
            if homes := self._preferred_homes(preferred):  # one may have been silent just now
                left, *_ = self._offer(homes, words, objects, options, granted, results, published)
            with self.node.admission.enter():
                is_in = self.node.admission.is_open
                if self._store is not None and is_in:
                    for i in left:
                        word = int(words[i, 0]), int(words[i, 1])
                        put = partial(
                            self._store.put_key, word, *objects[i], **put_arguments(options[i])
                        )
                        results[i] = under_claim(put)
                    new = [i for i in left if results[i] is PutResult.STORED]
                    self._store.age_tail_first(words[new])
            if left and (self._store is None or not is_in):
                self._give(words, objects, options, left, results, published)
        finally:
            self.node.claims.settle(words[granted], published[granted])
        return results

    def _claim(self, words: np.ndarray, guard: Guard) -> tuple[list[PutResult], list[int]]:
        """Claim the keys that are not here. Return the result of each key, and which were granted:
        these must be settled, and are ``FULL`` until there is more to say about them.
        """
        results = [PutResult.EXISTS] * len(words)
        missing = np.flatnonzero(~self._are_here(words))
        claims = self.node.claims.ask(words[missing], self._claim_s, guard)
        for i, claim in zip(missing.tolist(), claims.tolist(), strict=True):
            results[i] = RESULT_OF.get(claim, PutResult.FULL)
        return results, missing[claims == Claim.GRANTED].tolist()

    def _begin_each_here(
        self,
        guard: Guard,
        words: np.ndarray,
        num_bytes: Sequence[int],
        retention: Retention,
        position: int,
    ) -> list[ClusterPut | PutResult]:
        """Reserve space for many objects in this node's pool."""
        claimed_s = time.monotonic()
        claimed, granted = self._claim(words, guard)
        results: list[ClusterPut | PutResult] = [*claimed]
        try:
            for i in granted:
                results[i] = self._begin_here(
                    words[[i]], num_bytes[i], claimed_s, retention=retention, position=position + i
                )
        except BaseException:
            try:
                for put in results:
                    if isinstance(put, LocalPut):
                        put.give_up()
            finally:  # also of one that could not be given up: it is dropped
                self.node.claims.settle(words[granted])
            raise
        refused = [i for i in granted if isinstance(results[i], PutResult)]
        if refused:
            self.node.claims.settle(words[refused])
        return results

    def _begin_here(
        self,
        word: np.ndarray,
        num_bytes: int,
        claimed_s: float,
        *,
        retention: Retention,
        position: int,
    ) -> ClusterPut | PutResult:
        """Reserve space in this node's pool, under a granted claim."""
        assert self._store is not None
        first, second = word[0].tolist()
        begin = partial(self._store.begin_key, (first, second), num_bytes)
        begun = under_claim(partial(begin, retention=retention, position=position))
        if isinstance(begun, PutResult):
            return begun
        return LocalPut(
            word,
            begun,
            claimed_s,
            self,
            partial(self.node.claims.settle, word),
            self.node.claims.keep(word),
        )

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
        claims = self.node.claims.renew(words, self._claim_s)
        for put, claim in zip(old, claims.tolist(), strict=True):
            if claim != Claim.GRANTED:
                put.give_up(RESULT_OF[claim])
        if (lost := claims != Claim.GRANTED).any():
            self.node.claims.settle(words[lost])

    def _begin_staged(
        self,
        keys: StoreKeys,
        num_bytes: Sequence[int],
        options: np.ndarray,
        preferred: Sequence[str],
    ) -> list[ClusterPut | PutResult]:
        """Reserve memory of this process for objects."""
        is_there = self.exists_each(keys)
        homes = [] if is_there.all() else self._homes()
        if not homes and not is_there.all():
            raise Unavailable("begin: no node with a pool takes it: there is none")
        largest = max([member.capacity_bytes for member in homes], default=0)
        if self._store is not None and self.node.admission.is_open:  # it takes what others do not
            largest = max(largest, self._store.pool.capacity_bytes)
        results: list[ClusterPut | PutResult] = []
        for key, size, row, there in zip(keys, num_bytes, options, is_there.tolist(), strict=True):
            if there:
                results.append(PutResult.EXISTS)
            elif size > largest:
                results.append(PutResult.FULL)
            else:
                results.append(StagedPut(key, size, row, preferred, self))
        return results


def _which(results: Sequence[NewResult], wanted: PutResult) -> list[int]:
    return [i for i, result in enumerate(results) if result is wanted]


def under_claim(put: Callable[[], Result]) -> Result:
    """Return what a put does under a granted claim. A direct put of the same object that began
    before is refused because of the claim: its end is waited for.
    """
    until = time.monotonic() + DIRECT_S
    while (result := put()) is BEING_WRITTEN and time.monotonic() < until:
        time.sleep(PAUSE_S)
    return result
