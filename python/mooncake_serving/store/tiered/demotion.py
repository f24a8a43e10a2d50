"""Demotion of objects from a pool to the disk: a bounded queue, and the thread that writes it."""

import contextlib
import enum
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from mooncake_kernels.errors import ChecksumError, Unavailable
from mooncake_kernels.pool import Key, ObjectPool, PinnedObject, PutResult

from ..ssd.layout import PAGE
from .disk_view import DiskView

log = logging.getLogger("mooncake_serving.store.tiered")

OVERHEAD_BYTES = 2 * PAGE  # of an object on the disk, at most: its header, and padding
BATCH_BYTES = 16 << 20
BATCH_OBJECTS = 256
LOOK_S = 1.0  # for what other processes have removed


class Drop(str, enum.Enum):
    """Why an object that leaves the pool is not written: the count of these in the statistics."""

    UNADMITTED = "num_unadmitted"
    QUEUE_FULL = "num_queue_full"
    TOO_LARGE = "num_too_large"
    UNWRITTEN = "num_unwritten"
    DAMAGED = "num_damaged"
    REMOVED = "num_removed"
    CLOSED = "num_closed"


@dataclass(frozen=True)
class DemotionStats:
    """Counts of one moment, since the store was opened.

    Attributes:
        num_queued: objects that are waiting to be written, or being written.
        queued_bytes: size of these.
        num_written: objects that were written, and then evicted.
        written_bytes: size of these.
        num_unadmitted: objects that were evicted and not written, for the disk had no room left and
            they were used fewer than ``min_uses`` times.
        num_queue_full: those for which the queue had no room, or this process no pin.
        num_too_large: those that are larger than the disk takes.
        num_unwritten: those that the disk could not write.
        num_damaged: those that were damaged in the pool.
        num_removed: those that another process removed, or replaced, while they were queued.
        num_closed: those that were queued when the store was closed, and its time was over.
    """

    num_queued: int
    queued_bytes: int
    num_written: int
    written_bytes: int
    num_unadmitted: int = 0
    num_queue_full: int = 0
    num_too_large: int = 0
    num_unwritten: int = 0
    num_damaged: int = 0
    num_removed: int = 0
    num_closed: int = 0

    @property
    def num_dropped(self) -> int:
        """All objects that left the pool, or were queued for that, and were not written."""
        return sum(getattr(self, reason.value) for reason in Drop)


class KeyLocks:
    """Keys held by threads: a promotion and a removal of one object wait for each other.

    A wait may be interrupted, by Ctrl-C for example; then nothing is held.
    """

    def __init__(self) -> None:
        self._held: dict[object, set[Key]] = {}  # by holder
        self._all_held_by: object | None = None
        self._changed = threading.Condition()

    @contextlib.contextmanager
    def hold(self, keys: Iterable[Key]) -> Iterator[None]:
        """Wait until none of the keys is held, and hold all at once, so that none can deadlock."""
        wanted, holder = set(keys), object()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._are_free(wanted))
                self._held[holder] = wanted
            yield
        finally:
            with self._changed:
                self._held.pop(holder, None)
                self._changed.notify_all()

    @contextlib.contextmanager
    def hold_all(self) -> Iterator[None]:
        """Do the same with all keys."""
        holder = object()
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._all_held_by is None)
                self._all_held_by = holder  # from now on no other holder begins
                self._changed.wait_for(lambda: not self._held)
            yield
        finally:
            with self._changed:
                if self._all_held_by is holder:
                    self._all_held_by = None
                self._changed.notify_all()

    def _are_free(self, keys: set[Key]) -> bool:
        return self._all_held_by is None and all(map(keys.isdisjoint, self._held.values()))


class Demoter:
    """Writes objects of a pool to a disk, then evicts them. Thread-safe.

    Args:
        pool: where they are; they are pinned while they wait.
        disk: where they go.
        puts: the keys of puts that are checking both tiers: none of these is evicted.
        queue_bytes: limit of the queue; further objects are refused. So they are where it has half
            of the pins of this process, of which its readers need some.

    Attributes:
        on_evicted: functions that are called with the evicted keys, ``[n, 2]``.
    """

    def __init__(self, pool: ObjectPool, disk: DiskView, puts: KeyLocks, queue_bytes: int):
        self._pool, self._disk, self._puts = pool, disk, puts
        self.on_evicted: list[Callable[[np.ndarray], object]] = []
        self._queue_bytes = queue_bytes
        self._max_queued = max(1, pool.num_pins // 2)
        self._queue: dict[Key, PinnedObject] = {}  # in order of arrival
        self._writing: dict[Key, PinnedObject] = {}
        self._queued_bytes = 0
        self._num_batches = self._num_written = self._written_bytes = 0
        self._dropped: Counter[Drop] = Counter()
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="mk-demotion", daemon=True)
        self._thread.start()

    def offer(self, key: Key, *, if_room: bool = False) -> int | Drop:
        """Queue an object, unless it is queued already; return its size.

        Args:
            key: of the pool.
            if_room: only if the disk need drop nothing for it, and for what is queued.

        Returns:
            A reason if it cannot be queued, which is not counted here.
        """
        with self._changed:
            pinned = self._queue.get(key) or self._writing.get(key)
            if pinned is not None:
                return pinned.num_bytes
            if self._closing:
                return Drop.CLOSED
            if (pinned := self._pin(key)) is None:
                return Drop.QUEUE_FULL
            if reason := self._refused(pinned.num_bytes, if_room=if_room):
                pinned.close()
                return reason
            self._queue[key] = pinned
            self._queued_bytes += pinned.num_bytes
            self._changed.notify_all()
            return pinned.num_bytes

    def count(self, dropped: Iterable[Drop]) -> None:
        """Count objects that were evicted and not written."""
        with self._changed:
            self._dropped.update(dropped)

    def queued(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and sizes of what waits to be written, or is being written: ``[n, 2]``, ``[n]``."""
        with self._changed:
            queued = {**self._writing, **self._queue}
        keys = np.array([*queued], np.uint64).reshape(-1, 2)
        return keys, np.array([pinned.num_bytes for pinned in queued.values()], np.int64)

    def has_each(self, keys: np.ndarray) -> np.ndarray:
        """Which of ``[n, 2]`` keys are queued: ``[n]`` bool."""
        with self._changed:
            if self._is_idle():
                return np.zeros(len(keys), bool)
            pairs = map(tuple, keys.tolist())
            return np.array([key in self._queue or key in self._writing for key in pairs], bool)

    def wait_for(self, keys: Sequence[Key]) -> None:
        """Wait until none of these objects is queued any more."""
        with self._changed:
            self._changed.wait_for(
                lambda: not any(key in self._queue or key in self._writing for key in keys)
            )

    def wait_written(self) -> bool:
        """Wait until a part of the queue was written, or all was removed; False if it is empty."""
        with self._changed:
            before = self._num_batches
            if self._is_idle():
                return False
            self._changed.wait_for(lambda: self._num_batches != before or self._is_idle())
            return True

    def discard(self, keys: Sequence[Key]) -> None:
        """Remove objects from the queue; wait for those that are being written."""
        with self._changed:
            self._give_up([key for key in dict.fromkeys(keys) if key in self._queue])
            self._changed.wait_for(lambda: not any(key in self._writing for key in keys))

    def flush(self, timeout_s: float | None = None) -> bool:
        """Wait until the queue is empty; return whether it was in time."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what is queued, for at most this long; drop the rest. Idempotent."""
        self.flush(timeout_s)
        with self._changed:
            self._closing = True
            self._dropped[Drop.CLOSED] += self._give_up(list(self._queue))
            self._changed.notify_all()
        self._thread.join()

    def stats(self) -> DemotionStats:
        with self._changed:
            return DemotionStats(
                len(self._queue) + len(self._writing),
                self._queued_bytes,
                self._num_written,
                self._written_bytes,
                **{reason.value: count for reason, count in self._dropped.items()},
            )

    def _refused(self, num_bytes: int, *, if_room: bool) -> Drop | None:
        """Why an object of this size is not queued; None: it can be."""
        if num_bytes > self._disk.max_object_bytes:
            return Drop.TOO_LARGE
        num_queued = len(self._queue) + len(self._writing)
        if if_room:
            # Of those that are being written some may be on the disk by now: they count twice.
            queued = self._queued_bytes + num_bytes + (num_queued + 1) * OVERHEAD_BYTES
            if queued > self._disk.room_bytes:
                return Drop.UNADMITTED
        if self._queued_bytes + num_bytes > self._queue_bytes or num_queued >= self._max_queued:
            return Drop.QUEUE_FULL
        return None

    def _is_idle(self) -> bool:
        return not self._queue and not self._writing

    def _pin(self, key: Key) -> PinnedObject | None:
        try:
            return self._pool.pin(key, touch=False)  # a use would make it the last to be evicted
        except Unavailable:  # this process has too many pins
            return None

    def _give_up(self, keys: Sequence[Key]) -> int:
        for key in keys:
            pinned = self._queue.pop(key)
            self._queued_bytes -= pinned.num_bytes
            pinned.close()
        self._changed.notify_all()
        return len(keys)

    def _run(self) -> None:
        while (batch := self._take()) or not self._closing:
            if not batch:
                self._look()
                continue
            num_bytes = sum(pinned.num_bytes for pinned in batch.values())
            dropped = dict.fromkeys(batch, Drop.UNWRITTEN)
            self._write(batch, dropped)
            with self._changed:
                stored = [key for key in batch if key not in dropped]
                self._num_written += len(stored)
                self._written_bytes += sum(batch[key].num_bytes for key in stored)
                self._dropped.update(dropped.values())
                self._queued_bytes -= num_bytes
                self._num_batches += 1
                self._writing = {}
                self._changed.notify_all()
        self._disk.retry()

    def _look(self) -> None:
        """Have the disk record what other processes have removed."""
        try:
            self._disk.retry_new()
        except Exception:
            log.exception("what other processes have removed could not be recorded")

    def _take(self) -> dict[Key, PinnedObject]:
        """Wait for objects to be written; none if there are none for a while."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing, LOOK_S)
            num_bytes = 0
            while self._queue and num_bytes < BATCH_BYTES and len(self._writing) < BATCH_OBJECTS:
                key = next(iter(self._queue))
                self._writing[key] = self._queue.pop(key)
                num_bytes += self._writing[key].num_bytes
            return self._writing

    def _write(self, batch: dict[Key, PinnedObject], dropped: dict[Key, Drop]) -> None:
        """Write objects, and evict them. Those that are on the disk then are deleted from
        ``dropped``, which gets the reasons of the others.
        """
        try:  # the thread continues whatever happens: others wait for it
            self._disk.condemn(self._replaced(batch))
            whole = [key for key, pinned in batch.items() if self._is_whole(key, pinned)]
            dropped.update(dict.fromkeys(batch.keys() - whole, Drop.DAMAGED))
            self._disk.retry()

            def id_of(key: Key) -> int:
                object_id = self._id_of(key, batch[key])
                if not object_id:
                    dropped[key] = Drop.REMOVED
                return object_id

            results = self._disk.put_each(
                whole,
                [batch[key].view for key in whole],
                id_of,
                [batch[key].position for key in whole],
            )
            stored = [k for k, r in zip(whole, results, strict=True) if r is not PutResult.FULL]
            for key in stored:
                del dropped[key]
            with self._puts.hold(batch):
                evicted = self._evict(batch, stored)
            self._disk.retry()
            for tell in tuple(self.on_evicted):
                tell(evicted)
        except Exception:
            log.exception("%d objects could not be written", len(batch))
        for pinned in batch.values():
            pinned.close()

    def _replaced(self, batch: dict[Key, PinnedObject]) -> list[Key]:
        """The keys under which the disk has something else, from before they were put again."""
        keys = list(batch)
        is_there = self._disk.num_bytes_each(np.array(keys, np.uint64).reshape(-1, 2)) >= 0
        return [
            keys[i]
            for i in np.flatnonzero(is_there)
            if not self._disk.is_same(keys[i], batch[keys[i]])
        ]

    def _evict(self, batch: dict[Key, PinnedObject], stored: list[Key]) -> np.ndarray:
        """Evict objects, but none that was put again under its key; return the evicted keys.

        An object that a process without the tier removed meanwhile is condemned on the disk as
        well.
        """
        ids = {key: self._id_of(key, pinned) for key, pinned in batch.items()}
        there = {key: object_id for key, object_id in ids.items() if object_id}
        for pinned in batch.values():
            pinned.close()
        self._disk.condemn(set(stored).difference(there))
        keys = np.array(list(there), np.uint64).reshape(-1, 2)
        return self._pool.evict_keys(keys, np.array(list(there.values()), np.uint64)).keys

    def _id_of(self, key: Key, pinned: PinnedObject) -> int:
        """The id of this very object, 0 if the pool does not have it any more: while it is pinned,
        no other can take its place.
        """
        [object_id] = self._pool.ids_of([key]).tolist()  # first: of what is there until then
        found = self._pin(key)
        if found is None:
            return 0
        with found:
            return object_id if found.buffer.address == pinned.buffer.address else 0

    @staticmethod
    def _is_whole(key: Key, pinned: PinnedObject) -> bool:
        """Whether it is what was put: on the disk it would get a checksum of its current bytes."""
        try:
            pinned.verify()
        except ChecksumError:
            log.warning("object %#x, %#x is damaged: not written", *key, extra={"key": key})
            return False
        return True
