"""Publishes to all subscribers which objects came and went, without ever waiting for them."""

import itertools
import math
import os
import threading
import time
from collections import deque
from typing import Any, NamedTuple

import numpy as np
import zmq

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import as_keys, object_keys

from ..checks import MAX_NUMBER, check_integer
from .messages import (
    MEDIUM,
    AllBlocksCleared,
    AnyEvent,
    BlockHash,
    BlockRemoved,
    BlockStored,
    Event,
    Form,
    encode,
)
from .replay import (
    MAX_EMPTY,
    MAX_HWM,
    NUMBER_BYTES,
    KeptBatches,
    answer_replay,
    as_topic,
    endpoint_of,
    listening,
)

MAX_QUEUED = 100_000  # changes queued for the thread
MAX_BATCH = 4096  # changes in one batch
MAX_EVENT_BLOCKS = 4096  # of a change
HEARTBEAT_S = 1.0  # of silence, after which an empty batch says that there is nothing
CLOSE_S = 2.0


class Change(NamedTuple):
    """What happened to some blocks.

    Attributes:
        kind: of the event.
        medium: where they are, or were.
        hashes: of the blocks.
    """

    kind: type[AnyEvent]
    medium: str
    hashes: list[BlockHash]


class ChangeQueue:
    """A queue into which any thread puts, and from which one thread takes.

    Args:
        capacity: changes that can be queued. Beyond it they are dropped, and the consumer finds
            None in their place.

    Attributes:
        wake_fd: readable when there may be something to take, or the queue was closed.
        is_closed: whether ``close`` was called.
        num_dropped: changes that were dropped.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._lock = threading.Lock()
        self._changes: deque[Change | AnyEvent | None] = deque()
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.is_closed = False
        self.num_dropped = 0

    def put(self, *changes: Change | AnyEvent) -> None:
        """Append changes, with no other between them; drop what there is no room for, and ignore
        them after ``close``.
        """
        with self._lock:
            if self.is_closed:
                return
            was_empty = not self._changes
            for change in changes:
                if len(self._changes) < self._capacity:
                    self._changes.append(change)
                else:
                    self.num_dropped += 1
                    if self._changes[-1] is not None:
                        self._changes.append(None)
            if was_empty:
                os.eventfd_write(self.wake_fd, 1)

    def take(self, max_changes: int) -> list[Change | AnyEvent | None]:
        """Take the oldest changes, at most this many."""
        with self._lock:
            count = min(len(self._changes), max_changes)
            return [self._changes.popleft() for _ in range(count)]

    def clear_wake(self) -> None:
        """Reset ``wake_fd`` until the next change; take after this."""
        os.eventfd_read(self.wake_fd)

    def close(self) -> bool:
        """Accept no more, and wake the consumer; returns whether this was the first call."""
        with self._lock:
            is_first = not self.is_closed
            if is_first:
                self.is_closed = True
                os.eventfd_write(self.wake_fd, 1)
            return is_first

    def destroy(self) -> None:
        """Close the descriptor: called by the consumer, after ``close``."""
        with self._lock:
            os.close(self.wake_fd)


class EventPublisher(Closeable):
    """Publishes what it is given, usually by ``StoreEvents``, which finds what happens to a pool. A
    context manager.

    A put only appends to a queue. A thread numbers the queued changes, sends them, and keeps them
    for replay. If a subscriber is slow, ZeroMQ drops what it has no room for; if the thread is too
    slow, changes are dropped and a number with them. Either way the subscriber sees the gap, at the
    latest with the empty batch that is sent after every second without changes.

    Numbers start at the microseconds since 1970, so that subscribers also see a gap when a
    publisher is restarted. A forked child publishes nothing: it needs a publisher of its own.

    Args:
        endpoint: where to listen, as ZeroMQ writes it; "tcp://127.0.0.1:0" picks a free port.
            Whoever can connect reads which hashes there are: there is no authentication and no TLS.
        topic: first frame of each message, by which subscribers choose.
        replay_endpoint: where to listen for requests for batches that a subscriber has missed.
        buffer_steps: how many batches are kept for them, not counting empty ones.
        hwm: how many batches wait for a slow subscriber before they are dropped for it.
        namespace: publish the prefix hashes of this namespace, as integers. None: of all
            namespaces, as 16 bytes, which are hash and scope, each big-endian.
        block_size: tokens of a block, reported in events; 0: unknown.
        data_parallel_rank: reported in batches.
        form: of events: "map" for today's vLLM, "array" for earlier vLLM and SGLang.

    Attributes:
        endpoint: where it listens, with the port.
        replay_endpoint: the same for replay requests, "" if it does not listen for them.

    Raises:
        InvalidArgument: a number is out of range, or an endpoint is invalid.
        OSError: the address is in use, ...
    """

    def __init__(
        self,
        endpoint: str,
        *,
        topic: str = "",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        namespace: str | None = None,
        block_size: int = 0,
        data_parallel_rank: int | None = None,
        form: Form = "map",
    ):
        op = "EventPublisher"
        # Everything kept fits in one answer; what does not is dropped, not waited for.
        check_integer(op, "buffer_steps", buffer_steps, 1, MAX_HWM - MAX_EMPTY - 1)
        check_integer(op, "hwm", hwm, 1, MAX_HWM)
        check_integer(op, "block_size", block_size, 0, MAX_NUMBER)
        if data_parallel_rank is not None:
            check_integer(op, "data_parallel_rank", data_parallel_rank, 0, MAX_NUMBER)
        self._topic = as_topic(op, topic)
        if form not in ("map", "array"):
            raise InvalidArgument(f'EventPublisher: form must be "map" or "array", got {form!r}')
        if not isinstance(namespace, str | None):
            raise InvalidArgument(
                f"EventPublisher: namespace must be a str or None, got {namespace!r:.80}"
            )
        self._scope = None if namespace is None else object_keys([0], namespace)[0, 1]
        self._block_size = block_size
        self._rank = data_parallel_rank
        self._form: Form = form
        self._next = time.time_ns() // 1000
        self._kept: KeptBatches | None = None
        self._publish = listening(zmq.PUB, op, "endpoint", endpoint, hwm)
        self.endpoint = endpoint_of(self._publish)
        self._replay: zmq.Socket[bytes] | None = None
        self.replay_endpoint = ""
        if replay_endpoint is not None:
            try:
                most = buffer_steps + MAX_EMPTY + 1
                self._replay = listening(zmq.ROUTER, op, "replay_endpoint", replay_endpoint, most)
            except BaseException:
                self._publish.close()
                raise
            self.replay_endpoint = endpoint_of(self._replay)
            self._kept = KeptBatches(buffer_steps)
        self._queue = ChangeQueue(MAX_QUEUED)
        self._silent_at = time.monotonic() + HEARTBEAT_S
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Changes that were dropped because the thread was too slow."""
        return self._queue.num_dropped

    def publish(
        self, *changes: tuple[type[AnyEvent], np.ndarray, str], is_snapshot: bool = False
    ) -> None:
        """Publish changes in their order, with no others between them.

        Args:
            *changes: ``BlockStored`` or ``BlockRemoved``, keys ``[n, 2]``, and the medium.
            is_snapshot: whether nothing else is there.
        """
        queued = [Change(AllBlocksCleared, MEDIUM, [])] if is_snapshot else []
        for kind, keys, medium in changes:
            hashes = self._hashes(keys)
            for start in range(0, len(hashes), MAX_EVENT_BLOCKS):
                queued.append(Change(kind, medium, hashes[start : start + MAX_EVENT_BLOCKS]))
        if queued:
            self._queue.put(*queued)

    def publish_events(self, *events: AnyEvent) -> None:
        """Publish events as they are, in their order, with no others between them.

        For those who know more of a block than its hash: the tokens, and the block before it.
        """
        self._queue.put(*events)

    def publish_snapshot(self, keys: Any) -> None:
        """Publish that exactly these objects are there: how a router starts, and starts over.

        Objects that come or go between the listing of the keys and this call may be reported
        wrongly.

        Args:
            keys: ``[n, 2]``, such as ``pool.objects().keys``.

        Raises:
            InvalidArgument: they are no such integers.
        """
        words = as_keys("publish_snapshot", keys)
        self.publish((BlockStored, words, MEDIUM), is_snapshot=True)

    def close(self) -> None:
        """Send what is queued, then stop. Idempotent."""
        if self._queue.close():
            self._thread.join(CLOSE_S)

    def _hashes(self, keys: np.ndarray) -> list[BlockHash]:
        if self._scope is None:
            words = keys.astype(">u8").tobytes()
            return [words[start : start + 16] for start in range(0, len(words), 16)]
        return keys[keys[:, 1] == self._scope, 0].tolist()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._queue.wake_fd, zmq.POLLIN)
        if self._replay is not None:
            poller.register(self._replay, zmq.POLLIN)
        is_closed = False
        while not is_closed:
            left_s = max(0, self._silent_at - time.monotonic())
            ready = dict(poller.poll(math.ceil(left_s * 1000)))
            if self._queue.wake_fd in ready:
                self._queue.clear_wake()
                is_closed = self._queue.is_closed
                while changes := self._queue.take(MAX_BATCH):
                    self._send_changes(changes)
            if self._kept is not None and self._replay is not None and self._replay in ready:
                topic = self._topic if self._form == "map" else None
                answer_replay(self._replay, topic, self._kept)
            if not is_closed and time.monotonic() >= self._silent_at:
                self._send([])
        self._publish.close(linger=int(CLOSE_S * 1000))
        if self._replay is not None:
            self._replay.close()
        self._queue.destroy()

    def _send_changes(self, changes: list[Change | AnyEvent | None]) -> None:
        """Send a batch; adjacent changes of a kind form one event, and a gap skips a number."""
        events: list[AnyEvent] = []
        for place, group in itertools.groupby(changes, _place):
            if place is None:
                self._send(events)
                self._next += 1
                events = []
            elif isinstance(place, Event):
                events += [place for _ in group]
            else:
                hashes = [
                    one for change in group if isinstance(change, Change) for one in change.hashes
                ]
                events.append(self._event(*place, hashes))
        self._send(events)  # even an empty one: it shows the gap before it

    def _send(self, events: list[AnyEvent]) -> None:
        payload = encode(events, self._rank, self._form)
        number = self._next.to_bytes(NUMBER_BYTES, "big")
        self._publish.send_multipart((self._topic, number, payload))
        if self._kept is not None:
            self._kept.add(self._next, payload, is_empty=not events)
        self._next += 1
        self._silent_at = time.monotonic() + HEARTBEAT_S

    def _event(self, kind: type[AnyEvent], medium: str, hashes: list[BlockHash]) -> AnyEvent:
        if kind is BlockStored:
            return BlockStored(hashes, None, [], self._block_size, None, medium)
        if kind is BlockRemoved:
            return BlockRemoved(hashes, medium)
        return AllBlocksCleared()


def _place(change: Change | AnyEvent | None) -> tuple[type[AnyEvent], str] | AnyEvent | None:
    return (change.kind, change.medium) if isinstance(change, Change) else change
