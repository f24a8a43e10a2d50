"""A request from its submission to its end: the blocks, the lane it uses, the ticket."""

import itertools
import operator
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.transfer import Ticket

from .peers import Lane, Peers

Column = Sequence[int] | np.ndarray
Columns = tuple[Column, Column, Column]


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
    engine: mk.TransferEngine,
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
        if sizes.dtype.kind not in "iu":  # numpy makes floats of Python's integers beside its own
            kept = [operator.index(one) for one in lengths]
            sizes = np.array(kept, np.int64 if min(kept, default=0) < 0 else np.uint64)
    except (TypeError, ValueError, OverflowError):  # other objects, lists, huge integers
        sizes = np.empty((0, 0))
    if sizes.ndim != 1:
        raise InvalidArgument(f"lengths must be a list of integers, got {lengths!r:.80}")
    return sizes
