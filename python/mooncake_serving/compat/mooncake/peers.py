"""Peers by name, opened on first use, and the requests that are in flight to them."""

import concurrent.futures
import itertools
import operator
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from mooncake_kernels.errors import FailureKind, InvalidArgument, TransferError
from mooncake_kernels.transfer import Peer, Ticket, TransferEngine

Column = Sequence[int] | np.ndarray
Columns = tuple[Column, Column, Column]
MAX_LANES = 8  # to one name; a call that finds all of them busy queues behind another


class Lane:
    """One connection to a peer. Its users are counted under the lock of ``Peers``."""

    def __init__(self, name: str):
        self.name = name
        self.num_users = 0
        self.retired = False
        self._opened: concurrent.futures.Future[Peer] = concurrent.futures.Future()

    @property
    def peer(self) -> Peer:
        return self._opened.result(timeout=0)

    def open(self, engine: TransferEngine, deadline_s: float) -> None:
        try:
            self._opened.set_result(engine.open(self.name, allow_file=False, deadline_s=deadline_s))
        except BaseException as error:  # for those that wait, whatever it is
            kind = error.kind if isinstance(error, TransferError) else FailureKind.OTHER
            failed = TransferError(self.name, f"it was not opened: {error}", kind=kind)
            self._opened.set_exception(failed)
            raise

    def wait_until_open(self, deadline_s: float) -> None:
        try:
            self._opened.result(deadline_s)
        except concurrent.futures.TimeoutError:
            cause = f"deadline of {deadline_s:g} s passed"
            raise TransferError(self.name, cause, kind=FailureKind.TIMED_OUT) from None

    def close(self) -> None:
        if self._opened.exception(timeout=0) is None:
            self.peer.close()


class Peers:
    """The lanes of one engine, by the name of the peer. Thread-safe."""

    def __init__(self, engine: TransferEngine, max_lanes: int = MAX_LANES):
        self._engine = engine
        self._max_lanes = max_lanes  # to one name
        self._lock = threading.Lock()
        self._lanes: dict[str, list[Lane]] = {}

    def take(self, name: str, deadline_s: float) -> Lane:
        """Return an idle lane, else a new one, else the one with the fewest users.

        The caller must give it back. Only the users of a lane wait for it to open.

        Raises:
            InvalidArgument, Unavailable, TransferError: as ``TransferEngine.open``.
        """
        with self._lock:
            lanes = self._lanes.setdefault(name, [])
            lane = min(lanes, key=lambda lane: lane.num_users, default=None)
            is_new = lane is None or (lane.num_users > 0 and len(lanes) < self._max_lanes)
            if lane is None or is_new:
                lane = Lane(name)
                lanes.append(lane)
            lane.num_users += 1
        try:
            if is_new:
                lane.open(self._engine, deadline_s)
            else:
                lane.wait_until_open(deadline_s)
        except BaseException:
            self.give_back(lane, failed=True)
            raise
        return lane

    def give_back(self, lane: Lane, *, failed: bool) -> None:
        """End one use of a lane.

        After a failure none of the peer's lanes is used again: the peer may have been restarted,
        and then each of them would fail once. The last user of each closes it.
        """
        with self._lock:
            lane.num_users -= 1
            left = [lane]
            if failed and not lane.retired:
                left = self._lanes.pop(lane.name)
                for one in left:
                    one.retired = True
            closing = [one for one in left if one.retired and one.num_users == 0]
        for one in closing:
            one.close()


class Batch:
    """A request in flight."""

    def __init__(self, peers: Peers, lane: Lane, ticket: Ticket | None):
        self._peers = peers
        self._lane = lane
        self._ticket = ticket  # None: there was nothing to move

    @property
    def done(self) -> bool:
        """Whether ``wait`` would not block."""
        return self._ticket is None or self._ticket.done

    def wait(self) -> int:
        """Wait for the end, once; return the lane. 0, or raise ``TransferError``."""
        failed = True
        try:
            if self._ticket is not None:
                self._ticket.wait()
            failed = False
            return 0
        finally:
            if failed and self._ticket is not None:
                self._ticket.cancel()  # only Ctrl-C leaves it running
            self._peers.give_back(self._lane, failed=failed)


def submit(
    engine: TransferEngine,
    peers: Peers,
    name: str,
    columns: Columns,
    *,
    reads: bool,
    notify: bytes | None,
    timeout_s: float,
) -> Batch:
    """Open the peer, if need be, and submit the request to it.

    Raises:
        InvalidArgument, Unavailable, TransferError: nothing was moved.
    """
    begin_s = time.monotonic()
    local, remote, sizes = columns
    lane = peers.take(name, timeout_s)
    try:
        ticket = None
        if len(sizes) or notify is not None:
            move = engine.read_blocks if reads else engine.write_blocks
            until_s = begin_s + deadline_of(sizes, timeout_s)
            left_s = max(until_s - time.monotonic(), 1e-3)
            ticket = move(lane.peer, local, remote, sizes, deadline_s=left_s, notify=notify)
    except BaseException:
        peers.give_back(lane, failed=False)  # it is not the peer's fault
        raise
    return Batch(peers, lane, ticket)


def deadline_of(sizes: Column, timeout_s: float) -> float:
    """The seconds that Mooncake gives a request."""
    return timeout_s + float(np.sum(sizes, dtype=np.float64)) * 1e-9


def columns_of(buffers: Any, addresses: Any, lengths: Any) -> Columns:
    """The three lists without blocks of zero bytes, which Mooncake accepts."""
    lists = [_plain(one) for one in (buffers, addresses, lengths)]
    if not all(
        isinstance(one, Sequence) or (isinstance(one, np.ndarray) and one.ndim) for one in lists
    ):
        raise InvalidArgument(
            "buffers, peer_buffer_addresses and lengths must be lists of integers, got "
            f"{', '.join(type(one).__name__ for one in lists)}"
        )
    counts = [len(one) for one in lists]
    if len(set(counts)) > 1:
        raise InvalidArgument(
            "buffers, peer_buffer_addresses and lengths must be equally long, got "
            f"{', '.join(map(str, counts))}"
        )
    buffers, addresses, lengths = lists
    sizes = _sizes_of(lengths)
    if (sizes < 1).any():
        if (sizes < 0).any():
            raise InvalidArgument(f"lengths must not be negative, got {sizes.min()}")
        buffers, addresses = ([*itertools.compress(one, sizes)] for one in (buffers, addresses))
        sizes = sizes[sizes != 0]
    return buffers, addresses, sizes


def _plain(column: Any) -> Any:
    """An array of objects as a list of them."""
    is_boxed = isinstance(column, np.ndarray) and column.dtype == object
    return column.tolist() if is_boxed else column


def _sizes_of(lengths: Any) -> np.ndarray:
    try:
        sizes = np.asarray(lengths)
        if sizes.dtype.kind not in "iu":  # numpy makes floats of a mix of its integers and Python's
            kept = [operator.index(one) for one in lengths]
            sizes = np.array(kept, np.int64 if min(kept, default=0) < 0 else np.uint64)
    except (TypeError, ValueError, OverflowError):  # other objects, lists, huge integers
        sizes = np.empty((0, 0))
    if sizes.ndim != 1:
        raise InvalidArgument(f"lengths must be a list of integers, got {lengths!r:.80}")
    return sizes
