"""Draining: a node leaves, and its objects stay in the cluster."""

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import Key

from ..checks import check_bool, check_callable
from ..cluster import Node
from ..cluster.put import PUT_OPTIONS, options_of, uniform_options
from ..eviction.policy import pool_bytes
from ..keyspace import are_in
from ..store import Store
from .placement import Placement, check_placement
from .replicate import ANYWHERE, BATCH_KEYS, FreeBytes, ReplicaChange, ReplicationJob

PAUSE_S = 0.01  # while others of this host finish their writes
SAY_S = 5.0  # after which that is logged
OF_OTHERS = "only its disk has it, and another node serves its pool: drain that one first"

logger = logging.getLogger(__name__)


@dataclass
class DrainResult:
    """Progress of a node.

    Attributes:
        num_moved: objects gone from its pool and its disk because another pool confirmed that it
            has them.
        num_gone: objects that went otherwise meanwhile: removed, evicted, damaged on the disk, or
            given up by it for what was written.
        num_copied: for how many of those moved that pool had to make a copy.
        num_bytes: size of those moved.
        num_left: objects still in its pool.
        num_on_disk: other objects still on its disk.
        failed: keys of those that could not be moved, and why.
        has_left: whether the node has left.
    """

    num_moved: int = 0
    num_gone: int = 0
    num_copied: int = 0
    num_bytes: int = 0
    num_left: int = 0
    num_on_disk: int = 0
    failed: dict[Key, str] = field(default_factory=dict)
    has_left: bool = False


def drain(
    node: Node,
    *,
    placement: Placement = ANYWHERE,
    leave_disk: bool = False,
    on_progress: Callable[[DrainResult], object] = lambda drained: None,
    stop: threading.Event | None = None,
) -> DrainResult:
    """Move all objects of a node's pool, and of a disk behind it, to others; then close the node.

    From the start it is given no new objects, and its own puts go to other nodes. An object is
    removed only when another pool, which stays, has confirmed that it has it. So nothing is lost if
    draining is interrupted, and calling this again resumes it. If another node that stays serves
    the same pool, what is in it stays there; what only the disk has cannot be moved.

    What only the disk has is brought up into the pool, as much at a time as there is room for, the
    most recently used first. It goes only where others have free room, as last reported: otherwise
    it would push out what is in use, and what was moved before.

    Args:
        node: with a pool; of this process.
        placement: where objects go. By default a pool without room evicts for those that were in
            memory if no other has room.
        leave_disk: leave what only the disk has, for a node that comes back with it, and count it
            in ``num_on_disk``. Otherwise the node does not leave before all of it was moved.
        on_progress: called after each batch.
        stop: may be set to stop after the current batch, or while writes of others are waited for.
            The node then stays a member, and stays draining, as it does if some objects could not
            be moved: ``node.set_draining(False)`` returns it to normal.

    Returns:
        The progress made.

    Raises:
        InvalidArgument: the node has no pool, or was closed.
        Unavailable: the directory does not answer.
        TransferError: the disk cannot be read in time.
    """
    if not isinstance(node, Node):
        raise InvalidArgument(f"drain: node must be a Node, got {node!r:.80}")
    check_placement("drain", placement)
    check_bool("drain", "leave_disk", leave_disk)
    check_callable("drain", "on_progress", on_progress)
    if not node.is_open:
        raise node.not_open()
    if node.store is None:
        raise InvalidArgument(f"drain: node must have a pool, got {node.name} without")
    node.set_draining(True)
    drained, stop = DrainResult(), stop or threading.Event()
    drainer = _Drainer(node, node.store, placement, leave_disk, drained, stop)
    if _is_served_by_others(node):
        drainer.leave_pool()
    else:
        while drainer.find():
            while drainer.move_batch():
                on_progress(drained)
                if stop.is_set():
                    return drained
    if not stop.is_set() and not drained.failed:
        node.store.record_hidden()
        node.close()
        drained.has_left = True
    return drained


class _Drainer:
    """Moves a store's objects repeatedly until none is left or no more can be moved.

    A pool that evicts for one object may lose its copy of another, which then has to be moved
    again.
    """

    def __init__(
        self,
        node: Node,
        store: Store,
        placement: Placement,
        leave_disk: bool,
        drained: DrainResult,
        stop: threading.Event,
    ):
        self._node = node
        self._store = store
        self._placement = placement
        self._leave_disk = leave_disk
        self._drained = drained
        self._stop = stop
        self._room = FreeBytes()
        self._num_before = -1
        self._num_in_pool = 0  # of those found, which are the first
        self._keys = np.empty((0, 2), np.uint64)
        self._num_bytes = np.empty(0, np.int64)
        self._options = np.empty(0, PUT_OPTIONS)

    def find(self) -> bool:
        """Look for objects, also waiting for writes unless it is stopped; return whether some
        are to be moved.
        """
        say_at = time.monotonic() + SAY_S
        while True:
            num_writing = self._store.stats().num_writing
            is_written_to = self._node.admission.is_used or num_writing > 0
            objects = self._store.pool.objects()
            if len(objects.keys) or not is_written_to:
                break
            self._store.pool.reap()
            if time.monotonic() > say_at:
                say_at = math.inf
                logger.warning("%s waits for %d puts into its pool", self._node.name, num_writing)
            if self._stop.wait(PAUSE_S):
                break
        # In this order: an object is on the disk before it leaves the pool.
        on_disk, num_bytes = self._only_on_disk(objects.keys)
        if self._leave_disk:
            on_disk, num_bytes = on_disk[:0], num_bytes[:0]
        if failed := self._drained.failed:
            here = {(a, b) for a, b in np.concatenate([objects.keys, on_disk]).tolist()}
            for key in failed.keys() - here:  # it was evicted or removed meanwhile
                del failed[key]
        num_gone = self._drained.num_moved + self._drained.num_gone
        has_changed = num_gone > self._num_before
        self._num_before = num_gone
        if len(objects.keys) + len(on_disk) and has_changed:
            # Objects put just now may not be published yet; what only the disk has, another node of
            # the pool may have withdrawn, which does not see it.
            self._node.entries.publish_all()
            self._drained.failed.clear()
            self._num_in_pool = len(objects.keys)
            self._keys = np.concatenate([objects.keys, on_disk])
            self._num_bytes = np.concatenate([objects.num_bytes.astype(np.int64), num_bytes])
            self._options = np.concatenate([options_of(objects), uniform_options(len(on_disk))])
        return len(self._keys) > 0

    def move_batch(self) -> bool:
        """Move some of the objects found; return whether there were any left."""
        is_from_disk = self._num_in_pool == 0
        batch = [self._num_that_fit() if is_from_disk else min(BATCH_KEYS, self._num_in_pool)]
        keys, self._keys = np.split(self._keys, batch)
        num_bytes, self._num_bytes = np.split(self._num_bytes, batch)
        options, self._options = np.split(self._options, batch)
        if not len(keys):
            return False
        sizes = pool_bytes(self._store.pool, num_bytes)  # or others had room for fewer
        job = ReplicationJob(self._node, self._placement, self._room, 1, keys, sizes, options)
        if is_from_disk:
            job.placement = replace(self._placement, may_evict=False)
            job.bring_up_keys = self._store.bring_up_keys
        copied = job.run()
        members = self._node.directory.members()
        change = ReplicaChange(self._node, keys, members, options, hide=True)
        changed = change.run([], [self._node.pool_name])
        is_here = self._store.has_keys(keys)
        is_moved = ~is_here
        is_moved[list(changed.failed)] = False  # no other has confirmed that it has it
        num_gone = int((~is_here).sum())
        self._drained.num_copied += copied.num_made + changed.num_made
        self._drained.num_moved += int(is_moved.sum())
        self._drained.num_gone += num_gone - int(is_moved.sum())
        self._drained.num_bytes += int(num_bytes[is_moved].sum())
        self._drained.num_left = self._store.stats().num_ready
        if is_from_disk:
            self._drained.num_on_disk -= num_gone
        else:
            self._num_in_pool -= len(keys)
        for i in np.flatnonzero(is_here).tolist():
            reason = copied.failed.get(i) or changed.failed.get(i, "it was put again")
            self._drained.failed[int(keys[i, 0]), int(keys[i, 1])] = reason
        return True

    def leave_pool(self) -> None:
        """Leave the pool to others that serve it; report what only the disk has."""
        on_disk, _ = self._only_on_disk(self._store.pool.objects().keys)
        if not self._leave_disk:
            keys = [(first, second) for first, second in on_disk.tolist()]
            self._drained.failed.update(dict.fromkeys(keys, OF_OTHERS))

    def _only_on_disk(self, in_pool: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Keys and sizes of what is not in the pool; they are counted."""
        keys, num_bytes = self._store.on_disk()
        is_only = ~are_in(keys, in_pool)
        self._drained.num_on_disk = int(is_only.sum())
        return keys[is_only], num_bytes[is_only]

    def _num_that_fit(self) -> int:
        """How many of the next objects the pool has room for; a batch if the first does not fit."""
        ends = np.cumsum(pool_bytes(self._store.pool, self._num_bytes[:BATCH_KEYS]))
        free_bytes = self._store.stats().free_bytes
        return int(np.searchsorted(ends, free_bytes, side="right")) or BATCH_KEYS


def _is_served_by_others(node: Node) -> bool:
    return any(
        member.pool == node.pool_name and member.name != node.name and not member.is_draining
        for member in node.directory.members()
    )
