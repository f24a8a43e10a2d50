"""A node of this process, as the routes of a cluster see it."""

import logging
import threading
from collections.abc import Sequence

import numpy as np

from mooncake_kernels.closing import Closing
from mooncake_kernels.pool import Key

from ..copies.draining import Drained, drain
from ..directory import Member
from ..node import Node
from .cluster import Draining, DrainState

logger = logging.getLogger(__name__)


class NodeCluster(Closing):
    """The cluster of a node, for ``make_app``. A context manager.

    Args:
        node: whose pool is that of the app's store; the caller owns it and closes it after this
            object. A node that was drained closes itself.
    """

    def __init__(self, node: Node):
        self._node = node
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._drained = Drained()
        self._error: str | None = None

    def members(self) -> Sequence[Member]:
        return self._node.members()

    def own_pool(self) -> str:
        return self._node.pool_name

    def withdraw(self, key: Key) -> None:
        self._node.listing.withdraw(np.array([key], np.uint64))

    def drain(self, name: str) -> None:
        """Start draining the node in a thread; do nothing if it is draining or was drained."""
        if name != self._node.name:
            raise NotImplementedError(f"only {name} itself can do that: ask its admin server")
        with self._lock:
            if self._stop.is_set() or self._drained.has_left or self._is_draining():
                return
            self._drained, self._error = Drained(), None
            self._thread = threading.Thread(target=self._drain, name="store-drain", daemon=True)
            self._thread.start()

    def draining(self) -> Draining:
        with self._lock:
            drained = self._drained
            return Draining(
                self._state(),
                drained.num_moved,
                drained.num_left,
                len(drained.failed),
                self._error,
            )

    def close(self) -> None:
        """Stop draining after the current batch; draining can be resumed later. Idempotent."""
        with self._lock:
            self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _state(self) -> DrainState:
        if self._drained.has_left:
            return "left"
        if self._is_draining():
            return "draining"
        return "failed" if self._error is not None or self._drained.failed else "idle"

    def _is_draining(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _drain(self) -> None:
        try:
            self._note(drain(self._node, on_progress=self._note, stop=self._stop))
        except (RuntimeError, ValueError, OSError) as error:  # of ours, the pool or the system
            logger.warning("%s was not drained: %s", self._node.name, error)
            self._error = str(error) or type(error).__name__

    def _note(self, drained: Drained) -> None:
        self._drained = drained
