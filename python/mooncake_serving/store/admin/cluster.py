"""What the routes need from a cluster, and that of a node of this process."""

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, runtime_checkable

import numpy as np

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument, Unavailable, shown
from mooncake_kernels.pool import Key

from ..cluster import Node
from ..directory import Member
from ..replication.draining import DrainResult, drain

logger = logging.getLogger(__name__)

DrainState = Literal["idle", "draining", "left", "failed"]


@dataclass(frozen=True)
class Draining:
    """How far a node is with moving its objects elsewhere.

    Attributes:
        state: "idle": not requested, or stopped; "left": done, and the node has left the cluster;
            "failed": some objects could not be moved, or ``error`` ended the drain.
        num_moved: objects that other pools have now and this one no longer has.
        num_left: objects still here, as of the last batch.
        num_failed: objects that could not be moved.
        error: the error that ended the drain.
        is_accepting: whether the node takes new objects; not after a drain that failed.
        num_on_disk: other objects, which only the disk behind the pool has.
        num_gone: objects that went meanwhile without being moved.
    """

    state: DrainState
    num_moved: int
    num_left: int
    num_failed: int
    error: str | None
    is_accepting: bool
    num_on_disk: int = 0
    num_gone: int = 0


@runtime_checkable
class Cluster(Protocol):
    """What the routes need from a cluster."""

    def members(self) -> Sequence[Member]:
        """All live members, as last reported."""

    def own_name(self) -> str:
        """Name of this store's node, which may have left."""

    def own_pool(self) -> str:
        """Name of this store's pool in the cluster."""

    def withdraw(self, key: Key) -> None:
        """Tell the cluster that this store's pool no longer has an object."""

    def drain(self, name: str, *, leave_disk: bool = False) -> None:
        """Start moving a member's objects elsewhere; from now on it accepts no new objects.
        ``leave_disk``: what only the disk behind its pool has stays there.

        Raises:
            NotImplementedError: it is not possible; the message says why.
        """

    def cancel_drain(self, name: str) -> None:
        """Have a member accept new objects again, and stop moving what it has, after the current
        batch.

        Raises:
            NotImplementedError: it is not possible; the message says why.
        """

    def draining(self) -> Draining:
        """Progress of this node."""


class NodeCluster(Closeable):
    """The cluster of a node, for ``make_app``. A context manager.

    Args:
        node: whose pool is that of the app's store; the caller owns it and closes it after this
            object. A node that was drained closes itself.

    Raises:
        InvalidArgument: it is no node.
    """

    def __init__(self, node: Node):
        if not isinstance(node, Node):
            raise InvalidArgument(f"NodeCluster: node must be a Node, got {shown(node)}")
        self._node = node
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()  # of the drain that runs
        self._is_draining = self._is_cancelled = self._is_closed = False
        self._is_wanted_again = False  # while a cancelled drain ends
        self._leave_disk = False  # of the drain that runs, or is wanted
        self._drained = DrainResult()
        self._error: str | None = None

    def members(self) -> Sequence[Member]:
        if not self._drained.has_left:
            return self._node.members()
        # The node, which has left, is not notified of changes any more.
        return sorted(self._node.directory.members(), key=lambda member: member.name)

    def own_name(self) -> str:
        return self._node.name

    def own_pool(self) -> str:
        return self._node.pool_name

    def withdraw(self, key: Key) -> None:
        self._node.entries.withdraw(np.array([key], np.uint64))

    def drain(self, name: str, *, leave_disk: bool = False) -> None:
        """Start draining the node in a thread; do nothing if it is draining or was drained.

        A drain that was cancelled and has not ended yet is followed by another one. So is one that
        treats the disk otherwise, which ends after its current batch.
        """
        self._check_own(name)
        with self._lock:
            if self._is_closed or self._drained.has_left:
                return
            if self._is_draining and leave_disk != self._leave_disk:
                self._stop.set()
                self._is_cancelled = True
            self._leave_disk = leave_disk
            if self._is_draining:
                self._is_wanted_again = self._is_cancelled
            else:
                self._begin()

    def cancel_drain(self, name: str) -> None:
        """Have the node accept objects again: at once, or when the current batch is done."""
        self._check_own(name)
        with self._lock:
            if self._drained.has_left:
                raise NotImplementedError(f"{name} has left: its process must be started again")
            self._stop.set()
            self._is_cancelled, self._is_wanted_again = True, False
            if not self._is_draining:
                self._accept()

    def draining(self) -> Draining:
        with self._lock:
            drained = self._drained
            return Draining(
                self._state(),
                drained.num_moved,
                drained.num_left,
                len(drained.failed),
                self._error,
                not self._drained.has_left and not self._node.is_draining,
                drained.num_on_disk,
                drained.num_gone,
            )

    def close(self) -> None:
        """Stop draining after the current batch; draining can be resumed later. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._stop.set()
        if self._thread is not None:  # no other begins now
            self._thread.join()

    def _state(self) -> DrainState:
        if self._drained.has_left:
            return "left"
        if self._is_draining:
            return "draining"
        return "failed" if self._error is not None or self._drained.failed else "idle"

    def _check_own(self, name: str) -> None:
        if name != self._node.name:
            raise NotImplementedError(f"only {name} itself can do that: ask its admin server")

    def _begin(self) -> None:
        self._stop = threading.Event()
        self._is_cancelled = self._is_wanted_again = False
        self._drained, self._error = DrainResult(), None
        self._thread = threading.Thread(
            target=self._drain,
            args=(self._leave_disk, self._stop),
            name="store-drain",
            daemon=True,
        )
        self._thread.start()
        self._is_draining = True

    def _drain(self, leave_disk: bool, stop: threading.Event) -> None:
        try:
            drained = drain(self._node, leave_disk=leave_disk, on_progress=self._note, stop=stop)
            self._note(drained)
        except Exception as error:  # whatever it is, it is reported to whoever asks
            logger.warning("%s was not drained", self._node.name, exc_info=True)
            self._error = str(error) or type(error).__name__
        finally:
            with self._lock:
                self._is_draining = False
                if self._is_cancelled and not self._drained.has_left:
                    if self._is_wanted_again and not self._is_closed:
                        self._begin()
                    else:
                        self._accept()

    def _accept(self) -> None:
        self._drained, self._error = replace(self._drained, failed={}), None
        try:
            self._node.set_draining(False)
        except Unavailable as error:
            logger.warning("%s tells the directory later that it stays: %s", self._node.name, error)

    def _note(self, drained: DrainResult) -> None:
        self._drained = drained
