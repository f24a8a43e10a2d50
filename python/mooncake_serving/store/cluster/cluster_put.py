"""An object of all hosts that is being written: what ``ClusterStore.begin`` returns."""

import weakref
from collections.abc import Callable
from types import TracebackType

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import ObjectPut, PutResult


class ClusterPut:
    """An object that is being written in place. A context manager.

    Nobody sees it before ``commit()``, which the end of a ``with`` block calls, unless by an
    exception; then, or when it is dropped, it was never there.

    Attributes:
        num_bytes: size of the object.
        result: of the commit; None before it, and after ``abort()``.
    """

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
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
            ``STORED``; what else ``ClusterStore.put_from`` returns, of a node that has others take
            what it puts, for these are asked only now.

        Raises:
            InvalidArgument: the put is over, or the store is closed.
            TimeoutError: a stopped process holds the pool; the put is still open.
            Unavailable: as ``ClusterStore.put_from``; then it is over.
        """
        self._check_open("commit")
        self.result = self._commit()
        self._is_open = False
        return self.result

    def abort(self) -> None:
        """Give the space back, as if there had been no put. Idempotent; nothing after a commit."""
        if self._is_open:
            self._is_open = False
            self._abort()

    def _commit(self) -> PutResult:
        raise NotImplementedError

    def _abort(self) -> None:
        raise NotImplementedError

    def _check_open(self, op: str) -> None:
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


class PutHere(ClusterPut):
    """Written in the own pool, under a claim of this node.

    Args:
        put: in the pool.
        check: refuses what comes after the end of the node.
        settle: ends the claim; told whether the pool has the object.
        dropped: called, at any moment and with locks held, when nobody has ended it.
    """

    def __init__(
        self,
        put: ObjectPut,
        check: Callable[[], None],
        settle: Callable[[bool], None],
        dropped: Callable[[], None],
    ):
        super().__init__(put.num_bytes)
        self._put = put
        self._check = check
        self._settle = settle
        self._dropped = weakref.finalize(self, dropped)
        self._dropped.atexit = False

    @property
    def buffer(self) -> Buffer:
        return self._put.buffer

    @property
    def view(self) -> memoryview:
        return self._put.view

    def _commit(self) -> PutResult:
        self._check()
        self._put.commit()
        self._end(True)
        return PutResult.STORED

    def _abort(self) -> None:
        self._put.abort()
        self._end(False)

    def _end(self, is_stored: bool) -> None:
        self._dropped.detach()
        self._settle(is_stored)


class PutElsewhere(ClusterPut):
    """Written in memory of its own, out of which another node takes it in the end.

    Args:
        num_bytes: size of the object.
        put: has it taken.
    """

    def __init__(self, num_bytes: int, put: Callable[[np.ndarray], PutResult]):
        super().__init__(num_bytes)
        self._bytes = np.zeros(num_bytes, np.uint8)
        self._put = put

    @property
    def buffer(self) -> Buffer:
        self._check_open("buffer")
        return as_buffer(self._bytes)

    @property
    def view(self) -> memoryview:
        self._check_open("view")
        return self._bytes.data

    def _commit(self) -> PutResult:
        self._is_open = False
        return self._put(self._bytes)

    def _abort(self) -> None:
        self._bytes = np.empty(0, np.uint8)
