"""An object of all hosts that is being written: what ``ClusterStore.begin`` returns."""

import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPut, PutResult

from ..keyspace import StoreKey


class ClusterPut:
    """An object that is being written in place. A context manager.

    Nobody sees it before ``commit()``, which the end of a ``with`` block calls, unless by an
    exception; then, or when it is dropped, it was never there.

    What is written to ``view`` after that is an error that nobody notices.

    Attributes:
        num_bytes: size of the object.
        owner: the store that has begun it.
        result: of the commit; None before it, and after ``abort()``.
    """

    def __init__(self, num_bytes: int, owner: "Owner"):
        self.num_bytes = num_bytes
        self.owner = owner
        self.result: PutResult | None = None
        self._is_open = True

    @property
    def is_open(self) -> bool:
        """Whether it was neither committed nor aborted."""
        return self._is_open

    @property
    def buffer(self) -> Buffer:
        """The bytes where they are, in the host or on a GPU, to be written."""
        raise NotImplementedError

    @property
    def view(self) -> memoryview:
        """The bytes where they are, to be written. Not of what is on a GPU."""
        raise NotImplementedError

    def commit(self) -> PutResult:
        """Let all hosts see the object, which does not change any more.

        Returns:
            ``STORED``. ``EXISTS``, ``BEING_WRITTEN``: it took longer than the store's ``claim_s``,
            and another node was faster. What else ``ClusterStore.put_from`` returns, of a node that
            has others take what it puts, for these are asked only now.

        Raises:
            InvalidArgument: the put is over, or the store is closed.
            TimeoutError: a stopped process holds the pool; the put is still open.
            Unavailable: the directory does not answer, and it took longer than half of ``claim_s``.
                Of a node that has others take it: as ``ClusterStore.put_from``; then it is over.
        """
        return self.owner.commit_each([self])[0]

    def abort(self) -> None:
        """Give the space back, as if there had been no put. Idempotent; nothing after a commit."""
        if self._is_open:
            self._abort()
            self.end()

    def end(self, result: PutResult | None = None) -> None:
        """Take note that it is over: of ``ClusterStore.commit_each``, not for callers of that."""
        self._is_open = False
        self.result = result

    def _abort(self) -> None:
        raise NotImplementedError

    def check_open(self, op: str) -> None:
        """Refuse what is over."""
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
    """The store that has begun a put."""

    def commit_each(self, puts: Sequence[ClusterPut]) -> list[PutResult]: ...


class PutHere(ClusterPut):
    """Written in the own pool, under a claim of this node.

    Args:
        word: the key in the pool, ``[1, 2]``.
        put: in the pool.
        claimed_s: when the claim was asked for, of ``time.monotonic``.
        owner: the store.
        settle: ends the claim of what is not stored.
        dropped: called, at any moment and with locks held, when nobody has ended it.
    """

    def __init__(
        self,
        word: np.ndarray,
        put: ObjectPut,
        claimed_s: float,
        owner: Owner,
        settle: Callable[[], None],
        dropped: Callable[[], None],
    ):
        super().__init__(put.num_bytes, owner)
        self.word = word
        self.claimed_s = claimed_s
        self._put = put
        self._settle = settle
        self._dropped = weakref.finalize(self, dropped)
        self._dropped.atexit = False

    @property
    def buffer(self) -> Buffer:
        return self._put.buffer

    @property
    def view(self) -> memoryview:
        return self._put.view

    def store(self) -> None:
        """Commit it in the pool, which is to be published then."""
        self.check_open("commit")
        self._put.commit()
        self.end(PutResult.STORED)
        self._dropped.detach()

    def give_up(self, result: PutResult | None = None) -> None:
        """Abort it in the pool, whose claim is to be ended then."""
        self._put.abort()
        self.end(result)
        self._dropped.detach()

    def _abort(self) -> None:
        self.give_up()
        self._settle()


class PutElsewhere(ClusterPut):
    """Written in memory of its own, out of which another node takes it in the end.

    Args:
        key: of the object.
        num_bytes: its size.
        owner: the store.
    """

    def __init__(self, key: StoreKey, num_bytes: int, owner: Owner):
        super().__init__(num_bytes, owner)
        self.key = key
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
