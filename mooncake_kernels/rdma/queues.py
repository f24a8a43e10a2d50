"""Connections, and the queues that tell what has come of their transfers."""

import itertools
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _host
from .._arguments import as_instance, as_int32, as_integer, as_integers, as_seconds
from ..errors import InvalidArgument, TransferError
from ._handles import Handle
from .endpoint import Endpoint, endpoint_of
from .region import Region, RemoteRegion

if TYPE_CHECKING:
    from .device import Device

Ranges = Iterable[tuple[int, int, int]] | tuple[np.ndarray, np.ndarray, np.ndarray]

_SIGNAL_CHECK_S = 0.1  # how long Ctrl-C may go unnoticed in a wait
_MAX_WORK = 4096


@dataclass(frozen=True)
class Completion:
    """Something that is over: a transfer of ours, or one of a peer that came with an immediate.

    Attributes:
        token: what ``write()`` or ``read()`` returned; None of an immediate.
        qp_num: of which queue pair.
        status: ``"success"``, or why it failed, in the words of verbs; ``"closed"`` of what was
            not over when its queue pair was closed or connected anew.
        ok: whether it succeeded.
        vendor_error: a number for the NIC's vendor.
        immediate: what the peer sent along; None of a transfer.
        num_bytes: of a transfer, what is delivered for certain; of an immediate, what was written
            by the request that brought it.
    """

    token: int | None
    qp_num: int
    status: str
    ok: bool
    vendor_error: int
    immediate: int | None
    num_bytes: int

    def check(self) -> None:
        """Raise ``TransferError`` if it failed."""
        if not self.ok:
            raise TransferError(f"queue pair {self.qp_num}", self.status, self.num_bytes)


class CompletionQueue(Handle):
    """Tells what is over. Made by ``device.completion_queue()``; thread-safe."""

    def __init__(self, handle: Any, device: "Device"):
        super().__init__(handle)
        self.device = device
        self._tokens = itertools.count(1)
        self._lock = threading.Lock()
        self._untold: set[int] = set()  # transfers whose end nobody was told
        self._kept: list[Completion] = []  # what wait() has found while it waited for another

    def queue_pair(
        self,
        *,
        port: int = 1,
        gid_index: int | None = None,
        max_sends: int = 256,
        max_sges: int = 16,
        max_immediates: int = 0,
    ) -> "QueuePair":
        """Make a connection's end, which is not connected yet.

        Args:
            port: of the NIC.
            gid_index: of the port's address; None: a RoCE v2 address before a v1, IPv4 before IPv6.
            max_sends: work requests in flight; what is more waits in this process.
            max_sges: ranges of local memory that a work request gathers, if the NIC can as many.
            max_immediates: of the peer's, how many may wait to be polled; with 0 a peer that sends
                one waits for ever. max_sends + max_immediates count towards the queue's depth.

        Raises:
            InvalidArgument: a number out of its range, or a queue that is too short.
            Unavailable: the port has no address.
            OSError: the device has no more of them.
        """
        op = "queue_pair"
        index = -1 if gid_index is None else as_integer(op, "gid_index", gid_index, 0, 255)
        sizes = (
            as_int32(op, "max_sends", max_sends),
            as_int32(op, "max_sges", max_sges),
            as_int32(op, "max_immediates", max_immediates),
        )
        number = as_int32(op, "port", port)
        return QueuePair(self._handle.queue_pair(number, index, *sizes), self)

    def poll(self, *, timeout_s: float = 0.0, spin_s: float = 0.0) -> list[Completion]:
        """Return what is over; wait, asleep, until there is something or the time is up.

        Whoever polls also posts what its queue pairs had no room for: poll while transfers run.

        Args:
            timeout_s: how long to wait; 0: not at all.
            spin_s: for how long of that to look without a pause, which takes a processor and saves
                the time to be woken.

        Raises:
            InvalidArgument: the queue is closed, also when that happens during the wait.
        """
        until = time.monotonic() + as_seconds("poll", "timeout_s", timeout_s, minimum=0)
        spin_s = as_seconds("poll", "spin_s", spin_s, minimum=0)
        while not (found := self._take()) and (left_s := until - time.monotonic()) > 0:
            self._handle.wait(min(left_s, _SIGNAL_CHECK_S), spin_s)
        return found

    def wait(self, token: int, *, timeout_s: float = 30.0, spin_s: float = 0.0) -> Completion:
        """Poll until a transfer is over, check it and return its completion.

        What else is over meanwhile is kept: for ``poll()``, and for whoever waits for it in another
        thread.

        Raises:
            TransferError: it failed.
            TimeoutError: the time is up; the transfer goes on.
            InvalidArgument: that is no transfer of this queue, or its end was told already; or the
                queue is closed.
        """
        until = time.monotonic() + as_seconds("wait", "timeout_s", timeout_s, minimum=0)
        spin_s = as_seconds("wait", "spin_s", spin_s, minimum=0)
        while (completion := self._find(token)) is None:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"wait: transfer {token} is not over after {timeout_s} s")
            self._handle.wait(min(left_s, _SIGNAL_CHECK_S), spin_s)
        completion.check()
        return completion

    def _take(self) -> list[Completion]:
        """All that is over, which is told by that."""
        with self._lock:
            found = [*self._kept, *map(_completion, self._handle.poll(_MAX_WORK))]
            self._kept.clear()
            self._untold.difference_update(completion.token or 0 for completion in found)
            return found

    def _find(self, token: int) -> Completion | None:
        """That transfer's completion, if it is over; the others are kept."""
        with self._lock:
            if token not in self._untold:
                raise InvalidArgument(
                    "wait: token must be of a transfer of this queue whose end was not told yet, "
                    f"got {token!r}"
                )
            self._kept += map(_completion, self._handle.poll(_MAX_WORK))
            for i, completion in enumerate(self._kept):
                if completion.token == token:
                    self._untold.discard(token)
                    return self._kept.pop(i)
            return None


def _completion(values: tuple[Any, ...]) -> Completion:
    is_immediate, token, qp_num, status, vendor_error, immediate, num_bytes = values
    return Completion(
        token=None if is_immediate else token,
        qp_num=qp_num,
        status="success" if status == 0 else _host.rdma_status_text(status),
        ok=status == 0,
        vendor_error=vendor_error,
        immediate=immediate if is_immediate else None,
        num_bytes=num_bytes,
    )


class QueuePair(Handle):
    """One end of a reliable connection (RC). Made by ``queue.queue_pair()``; thread-safe.

    Hold it, also where only the peer reads and writes: what is garbage-collected is closed.

    Attributes:
        queue: which tells what is over.
        number: on its NIC.
        endpoint: what the peer connects to; another after ``reset()``.
        connected: whether it is, and has not failed.
    """

    def __init__(self, handle: Any, queue: CompletionQueue):
        super().__init__(handle)
        self.queue = queue
        self.number: int = handle.number

    @property
    def endpoint(self) -> Endpoint:
        """What the peer connects to; another after ``reset()``."""
        return endpoint_of(self._handle.endpoint)

    @property
    def connected(self) -> bool:
        """Whether it is connected, and no transfer has failed since."""
        return self._handle.connected

    def connect(
        self,
        peer: Endpoint,
        *,
        timeout: int = 14,
        retries: int = 6,
        rnr_retries: int = 7,
        traffic_class: int = 0,
        service_level: int = 0,
    ) -> None:
        """Connect to the peer's end, which must connect to this one.

        Args:
            peer: the other queue pair's ``endpoint``.
            timeout: of an acknowledgement, 4.096 us * 2**timeout: 14 is 67 ms.
            retries: after which a transfer fails, 67 ms each or more; 7 is for ever on soft-RoCE.
            rnr_retries: while the peer has no room for an immediate; 7 is for ever.
            traffic_class: of packets: DSCP and ECN on RoCE.
            service_level: on InfiniBand.

        Raises:
            InvalidArgument: ends that do not fit, a number out of its range, or one of them was
                connected before and not ``reset()`` since.
            OSError: the device refuses, for instance because it knows no route.
        """
        as_instance("connect", "peer", peer, Endpoint, "an Endpoint")
        self._handle.connect(
            peer.qp_num,
            peer.psn,
            peer.lid,
            peer.gid,
            peer.gid_type,
            peer.link_layer,
            peer.mtu,
            peer.max_reads_in,
            as_int32("connect", "timeout", timeout),
            as_int32("connect", "retries", retries),
            as_int32("connect", "rnr_retries", rnr_retries),
            as_int32("connect", "traffic_class", traffic_class),
            as_int32("connect", "service_level", service_level),
        )

    def reset(self) -> None:
        """Make it ready to be connected anew: after a failure, or to another peer.

        What is in flight ends as ``"closed"``. Both sides must do it, and tell each other their
        new ``endpoint`` before either connects: a side that had not done it would acknowledge what
        the other sends, taking it for repetitions, and not write it.

        Raises:
            InvalidArgument: it is closed.
            OSError: the device refuses.
        """
        self._handle.reset()

    def write(
        self, region: Region, remote: RemoteRegion, ranges: Ranges, *, immediate: int | None = None
    ) -> int:
        """Write ranges of a region to the peer's memory; return at once.

        ::

            for local, there, num_bytes in ranges:
                peer[there : there + num_bytes] = region[local : local + num_bytes]

        Ranges that continue each other on the remote side travel as one request, which gathers its
        parts. The memory must stay as it is until the completion has come.

        Args:
            region: local memory, of the same device.
            remote: the peer's.
            ranges: (local address, remote address, bytes) of each; or three uint64 arrays.
            immediate: 32 bits that the peer's queue tells when all of it is written.

        Returns:
            The token of its completion.

        Raises:
            InvalidArgument: a range outside of its region, named by its index; a right that is
                missing; a queue pair that is not connected or is closed.
        """
        return self._submit(False, region, remote, ranges, immediate)

    def read(self, region: Region, remote: RemoteRegion, ranges: Ranges) -> int:
        """Read ranges of the peer's memory into a region; otherwise as ``write()``."""
        return self._submit(True, region, remote, ranges, None)

    def _submit(
        self,
        reads: bool,
        region: Region,
        remote: RemoteRegion,
        ranges: Ranges,
        immediate: int | None,
    ) -> int:
        op = "read" if reads else "write"
        as_instance(op, "region", region, Region, "a Region of this device")
        as_instance(op, "remote", remote, RemoteRegion, "a RemoteRegion")
        if immediate is not None:
            immediate = as_integer(op, "immediate", immediate, 0, (1 << 32) - 1)
        columns = _columns(ranges, op)
        queue = self.queue
        with queue._lock:
            token = next(queue._tokens)
            queue._untold.add(token)
        try:
            self._handle.submit(reads, region._handle, remote.handle, *columns, immediate, token)
        except BaseException:
            with queue._lock:
                queue._untold.discard(token)
            raise
        return token


def _columns(ranges: Ranges, op: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    shape = "(local address, remote address, bytes) each: [n, 3]"
    if isinstance(ranges, tuple) and ranges and all(isinstance(c, np.ndarray) for c in ranges):
        columns = [as_integers(op, f"ranges[{i}]", c, "[n]") for i, c in enumerate(ranges)]
        if len(columns) != 3 or len({column.shape for column in columns}) != 1:
            shapes = [column.shape for column in columns]
            raise InvalidArgument(f"{op}: ranges must be three arrays of [n], got {shapes}")
        if columns[0].ndim == 1:
            local, there, sizes = map(np.ascontiguousarray, columns)
            return local, there, sizes
    if not isinstance(ranges, np.ndarray):
        as_instance(op, "ranges", ranges, Iterable, shape)
        rows: Any = list(ranges)
    else:
        rows = ranges
    table = as_integers(op, "ranges", rows, shape)
    if table.size == 0:
        table = table.reshape(0, 3)
    if table.ndim != 2 or table.shape[1] != 3:
        raise InvalidArgument(f"{op}: ranges must be {shape} integers, got shape {table.shape}")
    local, there, sizes = (np.ascontiguousarray(column) for column in table.T)
    return local, there, sizes
