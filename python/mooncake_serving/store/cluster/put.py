"""Objects to be put: a batch of them, and one that is written in place, as ``ClusterStore.begin``
returns it.
"""

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPool, ObjectPut, PoolObjects, PutResult, Retention

from ..checks import RETENTIONS, check_number, check_retention
from ..keyspace import StoreKey
from .claims import Guard

# The index in RETENTIONS, and the position, both as in ``PoolObjects``: a row for each object.
PUT_OPTIONS = np.dtype([("retention", "u1"), ("position", "<u2")])
NORMAL = RETENTIONS.index("normal")
HARD = RETENTIONS.index("hard")
MAX_POSITION = (1 << 16) - 1


class PutBatch(NamedTuple):
    """Objects to be put.

    Attributes:
        words: ``[n, 2]`` keys of the pool.
        objects: the parts of each, in order.
        options: ``[n]`` of ``PUT_OPTIONS``: how they are kept.
    """

    words: np.ndarray
    objects: Sequence[Sequence[Buffer]]
    options: np.ndarray

    def at(self, indices: Sequence[int]) -> "PutBatch":
        """Those with these indices."""
        chosen = [self.objects[i] for i in indices]
        return PutBatch(self.words[indices], chosen, self.options[indices])


def uniform_options(num_objects: int, retention: Retention = "normal") -> np.ndarray:
    """``[n]`` of ``PUT_OPTIONS`` for objects whose positions are unknown."""
    options = np.zeros(num_objects, PUT_OPTIONS)
    options["retention"] = RETENTIONS.index(retention)
    return options


def prompt_options(op: str, num_objects: int, retention: Retention, position: int) -> np.ndarray:
    """``[n]`` of ``PUT_OPTIONS`` for consecutive objects of a prompt, the first at ``position``.

    Raises:
        InvalidArgument: from ``op``: the retention or the position is not one.
    """
    if type(retention) is not str or retention not in RETENTIONS:
        check_retention(op, retention)
    if type(position) is not int or not 0 <= position <= MAX_POSITION:
        check_number(op, "position", position)
    first = min(int(position), MAX_POSITION)
    options = np.zeros(num_objects, PUT_OPTIONS)
    options["retention"] = RETENTIONS.index(retention)
    options["position"] = np.minimum(first + np.arange(num_objects), MAX_POSITION)
    return options


def options_of(objects: PoolObjects) -> np.ndarray:
    """``[n]`` of ``PUT_OPTIONS``: how a pool keeps its objects."""
    options = np.zeros(len(objects.keys), PUT_OPTIONS)
    options["retention"], options["position"] = objects.retention, objects.position
    return options


def options_in(pool: ObjectPool, keys: np.ndarray) -> np.ndarray:
    """``[n]`` of ``PUT_OPTIONS``: how a pool keeps ``[n, 2]`` objects; normally those that it does
    not have. It looks at every object of the pool.
    """
    objects = pool.objects()
    asked = np.flatnonzero(np.isin(objects.keys[:, 0], keys[:, 0]))
    found = options_of(objects)[asked]
    rows = {tuple(key): row for key, row in zip(objects.keys[asked].tolist(), found, strict=True)}
    options = np.zeros(len(keys), PUT_OPTIONS)
    for i, key in enumerate(keys.tolist()):
        options[i] = rows.get(tuple(key), options[i])
    return options


def put_arguments(options: np.void) -> dict[str, Any]:
    """A row of ``PUT_OPTIONS`` as the arguments of a put."""
    return {"retention": RETENTIONS[options["retention"]], "position": int(options["position"])}


class ClusterPut:
    """An object that is being written in place. A context manager.

    No reader sees it before ``commit()``, which is called when a ``with`` block ends without an
    exception. After an exception, or if the put is dropped, the object never existed. Others may
    write the key of a dropped one within a third of the node's ``ttl_s``.

    Writing to ``view`` after that is an error that goes undetected.

    Attributes:
        num_bytes: size of the object.
        owner: began it, and commits it.
        result: of the commit; None before it, and after ``abort()``.
    """

    def __init__(self, num_bytes: int, owner: "Owner"):
        self.num_bytes = num_bytes
        self.owner = owner
        self.result: PutResult | None = None
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """Whether it was neither committed nor aborted yet."""
        return self._is_open

    @property
    def buffer(self) -> Buffer:
        """The bytes to write, in host memory or on a GPU."""
        raise NotImplementedError

    @property
    def view(self) -> memoryview:
        """The bytes to write, in place. Not available for objects on a GPU."""
        raise NotImplementedError

    def commit(self) -> PutResult:
        """Make the object visible to all hosts; it does not change any more.

        Returns:
            ``STORED``. ``EXISTS``, ``BEING_WRITTEN``: the put took longer than the store's
            ``claim_s``, and another node was faster. A node that has others take what it puts asks
            them only now, and may return any other result of ``ClusterStore.put_from``.

        Raises:
            InvalidArgument: the put is over, or the store is closed.
            TimeoutError: a stopped process holds the pool; the put is still open.
            Unavailable: the directory does not answer, and the put took longer than half of
                ``claim_s``. On a node that has others take what it puts: as
                ``ClusterStore.put_from``; then the put is over.
        """
        return self.owner.commit_each([self])[0]

    def abort(self) -> None:
        """Return the space, as if there had been no put. Idempotent; no effect after a commit."""
        if self._is_open:
            self._abort()
            self.end()

    def end(self, result: PutResult | None = None) -> None:
        """Mark the put as over: for ``ClusterStore.commit_each`` only."""
        self._is_open = False
        self.result = result

    def _abort(self) -> None:
        raise NotImplementedError

    def check_open(self, op: str) -> None:
        """Refuse a put that is over."""
        if not self._is_open:
            raise InvalidArgument(f"{op}: put must be open, got one that was committed or aborted")

    def __enter__(self) -> "ClusterPut":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            self.abort()
        elif self._is_open:
            self.commit()


class Owner(Protocol):
    """What began a put."""

    def commit_each(self, puts: Sequence[ClusterPut]) -> list[PutResult]: ...


class LocalPut(ClusterPut):
    """A put written in this node's pool, under a claim of this node.

    Args:
        word: the key in the pool, ``[1, 2]``.
        put: in the pool.
        claimed_s: when the claim was requested, of ``time.monotonic``.
        owner: began it.
        settle: ends the claim if the object is not stored.
        guard: of the claim, which is ended later if the put is dropped.
    """

    def __init__(
        self,
        word: np.ndarray,
        put: ObjectPut,
        claimed_s: float,
        owner: Owner,
        settle: Callable[[], None],
        guard: Guard,
    ):
        super().__init__(put.num_bytes, owner)
        self.word = word
        self.claimed_s = claimed_s
        self._put = put
        self._settle = settle
        self._guard = guard

    @property
    def buffer(self) -> Buffer:
        return self._put.buffer

    @property
    def view(self) -> memoryview:
        return self._put.view

    def store(self) -> None:
        """Commit it in the pool; the caller must then publish it."""
        self.check_open("commit")
        self._put.commit()
        self.end(PutResult.STORED)

    def give_up(self, result: PutResult | None = None) -> None:
        """Abort it in the pool; the caller must then end its claim."""
        self._put.abort()
        self.end(result)

    def _abort(self) -> None:
        self.give_up()
        self._settle()


class StagedPut(ClusterPut):
    """A put written in memory of its own, from which another node takes it at the commit.

    Args:
        key: of the object.
        word: the same in a pool, ``[1, 2]``.
        num_bytes: its size.
        options: a row of ``PUT_OPTIONS``: how it is kept.
        preferred: who is asked first.
        owner: began it.
    """

    def __init__(
        self,
        key: StoreKey,
        word: np.ndarray,
        num_bytes: int,
        options: np.void,
        preferred: Sequence[str],
        owner: Owner,
    ):
        super().__init__(num_bytes, owner)
        self.key = key
        self.word = word
        self.options = options
        self.preferred = tuple(preferred)
        self.bytes = np.zeros(num_bytes, np.uint8)

    @property
    def buffer(self) -> Buffer:
        self.check_open("buffer")
        return as_buffer(self.bytes)

    @property
    def view(self) -> memoryview:
        self.check_open("view")
        return self.bytes.data

    def end(self, result: PutResult | None = None) -> None:
        super().end(result)
        if result is not None:
            self._abort()

    def _abort(self) -> None:
        self.bytes = np.empty(0, np.uint8)
