"""Receives events of publishers, ours or vLLM's, in order, and detects what it has missed."""

import logging
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real

import zmq

from mooncake_kernels.closeable import Closeable
from mooncake_kernels.errors import InvalidArgument, shown

from ..checks import check_integer
from .messages import AllBlocksCleared, AnyEvent, decode
from .replay import MAX_HWM, NUMBER_BYTES, Numbered, as_topic, connected, request_replay

logger = logging.getLogger(__name__)

POLL_S = 0.5
PING_S = 5.0  # of ZeroMQ
GONE_S = 15.0  # of silence of the publisher's host, after which it is connected to anew
NUM_RECENT = 1000  # batches that are known again when they come twice


@dataclass(frozen=True)
class EventBatch:
    """A batch of a publisher's events.

    Attributes:
        sequence: its number.
        timestamp: when it was sent, in seconds since 1970 by the publisher's clock.
        events: in the order in which they happened.
        data_parallel_rank: of the publisher, if it says so.
        is_after_gap: whether earlier batches were lost for good, or the publisher was restarted:
            what is known of it may be wrong, and must be requested again. So it is with the first
            batch of a subscription, unless it begins a snapshot or has the number 0: what came
            before it is not known.
    """

    sequence: int
    timestamp: float
    events: list[AnyEvent]
    data_parallel_rank: int | None
    is_after_gap: bool


class Subscription(Closeable):
    """What ``subscribe`` returns; for one thread. A context manager, and an endless iterator.

    Attributes:
        num_malformed: messages that were not batches, and were skipped; the first is logged.
        num_unknown: events of types that are not known here, and were left out of their batches;
            the first is logged.
        num_repeated: batches that came again, and were skipped.
    """

    def __init__(self, endpoint: str, topic: str, replay_endpoint: str | None, hwm: int):
        check_integer("subscribe", "hwm", hwm, 1, MAX_HWM)
        prefix = as_topic("subscribe", topic)
        if replay_endpoint is not None:
            connected(zmq.DEALER, "subscribe", "replay_endpoint", replay_endpoint, hwm).close()
        self._socket = connected(
            zmq.SUB, "subscribe", "endpoint", endpoint, hwm, ping_s=PING_S, gone_s=GONE_S
        )
        self._socket.subscribe(prefix)
        self._replay_endpoint = replay_endpoint
        self._hwm = hwm
        self._expected: int | None = None
        self._arrived: deque[Numbered] = deque()
        self.num_malformed = 0
        self._recent: OrderedDict[int, int] = OrderedDict()  # hashes of payloads, by number
        self.num_unknown = 0
        self.num_repeated = 0

    def receive(self, timeout_s: float | None = None) -> EventBatch | None:
        """Wait for the next batch.

        Args:
            timeout_s: seconds; None: wait forever. If batches were missed it may take longer:
                until the publisher has sent them again, or nothing for 2 seconds.

        Returns:
            The batch; None if there was none in time.

        Raises:
            InvalidArgument: the time is no number, or the subscription was closed.
        """
        if self.closed:
            raise InvalidArgument("receive: the subscription must be open, got a closed one")
        if timeout_s is not None and not (isinstance(timeout_s, Real) and timeout_s == timeout_s):
            raise InvalidArgument(
                f"receive: timeout_s must be seconds or None, got {shown(timeout_s, 80)}"
            )
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            while self._arrived:
                batch = self._accept(*self._arrived.popleft())
                if batch is not None:
                    return batch
            left_s = POLL_S if until is None else min(POLL_S, until - time.monotonic())
            if self._socket.poll(max(0, int(left_s * 1000))):
                self._take_message()
            elif until is not None and time.monotonic() >= until:
                return None

    @property
    def closed(self) -> bool:
        return self._socket.closed

    def close(self) -> None:
        """Disconnect. Idempotent."""
        self._socket.close(linger=0)

    def _take_message(self) -> None:
        frames = self._socket.recv_multipart()
        if len(frames) != 3 or len(frames[1]) != NUMBER_BYTES:
            self._skip(f"{len(frames)} frames")
            return
        number = int.from_bytes(frames[1], "big")
        first = self._expected or 0  # of a publisher not heard before, whatever it has
        if number > first:
            self._arrived.extend(self._missed(first, number))
        self._arrived.append((number, frames[2]))

    def _skip(self, why: str) -> None:
        if self.num_malformed == 0:
            logger.warning("a message is no batch of KV events, and is skipped: %s", why)
        self.num_malformed += 1

    def _missed(self, first: int, end: int) -> list[Numbered]:
        """Request the batches from ``first`` to before ``end``; returns those still available."""
        if self._replay_endpoint is None:
            return []
        missed: dict[int, bytes] = {}
        for number, payload in request_replay(self._replay_endpoint, first, self._hwm):
            if number >= end:
                break
            if number >= first:
                missed[number] = payload
        return sorted(missed.items())

    def _accept(self, number: int, payload: bytes) -> EventBatch | None:
        contents = hash(payload)
        if self._recent.get(number) == contents:
            self.num_repeated += 1
            return None
        try:
            timestamp, events, rank, unknown = decode(payload)
        except InvalidArgument as error:  # its number is missing from now on, as the next one shows
            self._skip(str(error))
            return None
        if unknown and self.num_unknown == 0:
            logger.warning("a KV event is of an unknown type, and is left out: %.80s", unknown[0])
        self.num_unknown += len(unknown)
        if self._expected is None:
            is_after_gap = number > 0 and AllBlocksCleared not in map(type, events)
        else:
            is_after_gap = number != self._expected
        self._expected = number + 1
        self._recent[number] = contents
        if len(self._recent) > NUM_RECENT:
            self._recent.popitem(last=False)
        return EventBatch(number, timestamp, events, rank, is_after_gap)

    def __iter__(self) -> Iterator[EventBatch]:
        while True:
            batch = self.receive()
            assert batch is not None
            yield batch


def subscribe(
    endpoint: str, *, topic: str = "", replay_endpoint: str | None = None, hwm: int = 100_000
) -> Subscription:
    """Receive the events of one publisher, from now on; with ``replay_endpoint`` from the first
    batch on that it still has, which is a snapshot where a pool is served.

    Args:
        endpoint: where it listens. It may start later, go away, and come back, also without having
            said so: a host that says nothing is connected to anew after 20 seconds.
        topic: prefix of the topics to receive.
        replay_endpoint: where it listens for requests for missed batches; without it every gap is
            permanent.
        hwm: how many batches may wait here; what arrives beyond that is missed.

    Raises:
        InvalidArgument: an endpoint is invalid.
    """
    return Subscription(endpoint, topic, replay_endpoint, hwm)
