"""Draining: a node leaves, and its objects stay in the cluster."""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import Key

from ..checks import check_callable
from ..node import Node
from ..node.kept import KEPT, kept_of
from ..store import Store
from .changing import ReplicaChange
from .placement import Placement, check_placement
from .spreading import ANYWHERE, BATCH_KEYS, Room, Spreader

PAUSE_S = 0.01  # while others of this host finish their writes
SAY_S = 5.0  # after which that is logged

logger = logging.getLogger(__name__)


@dataclass
class Drained:
    """Progress of a node.

    Attributes:
        num_moved: objects gone from its pool because another pool confirmed that it has them.
        num_copied: for how many of them that pool had to make a copy.
        num_bytes: size of those that are gone.
        num_left: objects still in its pool.
        failed: keys of those that could not be moved, and why.
        has_left: whether the node has left.
    """

    num_moved: int = 0
    num_copied: int = 0
    num_bytes: int = 0
    num_left: int = 0
    failed: dict[Key, str] = field(default_factory=dict)
    has_left: bool = False


def drain(
    node: Node,
    *,
    placement: Placement = ANYWHERE,
    on_progress: Callable[[Drained], object] = lambda drained: None,
    stop: threading.Event | None = None,
) -> Drained:
    """Move all objects of a node's pool to others, then close the node.

    From the start it is given no new objects, and its own puts go to other nodes. An object is
    removed only when another pool, which stays, has confirmed that it has it. So nothing is lost if
    draining is interrupted, and calling this again resumes it. If another node that stays serves
    the same pool, there is nothing to move.

    Args:
        node: with a pool; of this process.
        placement: where objects go. By default a pool without room evicts for them if no other has
            room.
        on_progress: called after each batch.
        stop: may be set to stop after the current batch, or while writes of others are waited for.
            The node then stays a member, and stays draining, as it does if some objects could not
            be moved: ``node.set_draining(False)`` returns it to normal.

    Returns:
        The progress made.

    Raises:
        InvalidArgument: the node has no pool, or was closed.
        Unavailable: the directory does not answer.
    """
    if not isinstance(node, Node):
        raise InvalidArgument(f"drain: node must be a Node, got {node!r:.80}")
    check_placement("drain", placement)
    check_callable("drain", "on_progress", on_progress)
    node.check_process()
    if node.store is None:
        raise InvalidArgument(f"drain: node must have a pool, got {node.name} without")
    node.set_draining(True)
    drained, stop = Drained(), stop or threading.Event()
    if not _is_served_by_others(node):
        mover = _Mover(node, node.store, placement, drained, stop)
        while mover.find():
            while mover.move_batch():
                on_progress(drained)
                if stop.is_set():
                    return drained
    if not stop.is_set() and not drained.failed:
        node.close()
        drained.has_left = True
    return drained


class _Mover:
    """Moves a pool's objects repeatedly until none is left or no more can be moved.

    A pool that evicts for one object may lose its copy of another, which then has to be moved
    again.
    """

    def __init__(
        self,
        node: Node,
        store: Store,
        placement: Placement,
        drained: Drained,
        stop: threading.Event,
    ):
        self._node = node
        self._store = store
        self._placement = placement
        self._drained = drained
        self._stop = stop
        self._room = Room()
        self._num_before = -1
        self._keys = np.empty((0, 2), np.uint64)
        self._num_bytes = np.empty(0, np.int64)
        self._kept = np.empty(0, KEPT)

    def find(self) -> bool:
        """Look for objects, also waiting for writes unless it is stopped; return whether some
        are to be moved.
        """
        say_at = time.monotonic() + SAY_S
        while True:
            num_writing = self._store.stats().num_writing
            is_written_to = self._node.intake.is_used or num_writing > 0
            objects = self._store.pool.objects()
            if len(objects.keys) or not is_written_to:
                break
            self._store.pool.reap()
            if time.monotonic() > say_at:
                say_at = math.inf
                logger.warning("%s waits for %d puts into its pool", self._node.name, num_writing)
            if self._stop.wait(PAUSE_S):
                break
        has_moved = self._drained.num_moved > self._num_before
        self._num_before = self._drained.num_moved
        if len(objects.keys) and has_moved:
            self._node.listing.tell_changes()  # objects put just now may not be published yet
            self._drained.failed.clear()
            self._keys, self._num_bytes = objects.keys, objects.num_bytes.astype(np.int64)
            self._kept = kept_of(objects)
        return len(self._keys) > 0

    def move_batch(self) -> bool:
        """Move some of the objects found; return whether there were any left."""
        keys, self._keys = np.split(self._keys, [BATCH_KEYS])
        num_bytes, self._num_bytes = np.split(self._num_bytes, [BATCH_KEYS])
        kept, self._kept = np.split(self._kept, [BATCH_KEYS])
        if not len(keys):
            return False
        copied = Spreader(self._node, self._placement, self._room, 1, keys, num_bytes, kept).run()
        members = self._node.directory.members()
        change = ReplicaChange(self._node, keys, members, kept).run([], [self._node.pool_name])
        is_here = self._store.pool.contains_each(keys)
        self._drained.num_copied += copied.num_made + change.num_made
        self._drained.num_moved += int((~is_here).sum())
        self._drained.num_bytes += int(num_bytes[~is_here].sum())
        self._drained.num_left = self._store.stats().num_ready
        for i in np.flatnonzero(is_here).tolist():
            reason = copied.failed.get(i) or change.failed.get(i, "it was put again")
            self._drained.failed[int(keys[i, 0]), int(keys[i, 1])] = reason
        return True


def _is_served_by_others(node: Node) -> bool:
    return any(
        member.pool == node.pool_name and member.name != node.name and not member.is_draining
        for member in node.directory.members()
    )
