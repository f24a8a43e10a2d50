"""Connections, and the queues that tell what has come of their transfers."""

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass
from operator import index
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _host
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
        index = -1 if gid_index is None else gid_index
        sizes = max_sends, max_sges, max_immediates
        return QueuePair(self._handle.queue_pair(port, index, *sizes), self)

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
        completions = self._handle.poll(_MAX_WORK)
        until = time.monotonic() + timeout_s
        while not completions and (left_s := until - time.monotonic()) > 0:
            self._handle.wait(min(left_s, _SIGNAL_CHECK_S), spin_s)
            completions = self._handle.poll(_MAX_WORK)
        return [_completion(values) for values in completions]

    def wait(self, token: int, *, timeout_s: float = 30.0, spin_s: float = 0.0) -> list[Completion]:
        """Poll until a transfer is over, and check it.

        Returns:
            All that is over, that transfer among it.

        Raises:
            TransferError: it failed.
            TimeoutError: the time is up; the transfer goes on.
        """
        seen: list[Completion] = []
        until = time.monotonic() + timeout_s
        while (left_s := until - time.monotonic()) > 0:
            new = self.poll(timeout_s=left_s, spin_s=spin_s)
            seen += new
            for completion in new:
                if completion.token == token:
                    completion.check()
                    return seen
        raise TimeoutError(f"wait: transfer {token} is not over after {timeout_s} s")


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
        endpoint: what the peer connects to.
        connected: whether it is, and has not failed.
    """

    def __init__(self, handle: Any, queue: CompletionQueue):
        super().__init__(handle)
        self.queue = queue
        self.number: int = handle.number
        self.endpoint: Endpoint = endpoint_of(handle.endpoint)

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
        """Connect to the peer's end, which must connect to this one; both may do it once more.

        Args:
            peer: the other queue pair's ``endpoint``.
            timeout: of an acknowledgement, 4.096 us * 2**timeout: 14 is 67 ms.
            retries: after which a transfer fails, 67 ms each or more; 7 is for ever on soft-RoCE.
            rnr_retries: while the peer has no room for an immediate; 7 is for ever.
            traffic_class: of packets: DSCP and ECN on RoCE.
            service_level: on InfiniBand.

        Raises:
            InvalidArgument: ends that do not fit, or a number out of its range.
            OSError: the device refuses, for instance because it knows no route.
        """
        self._handle.connect(
            peer.qp_num,
            peer.psn,
            peer.lid,
            peer.gid,
            peer.gid_type,
            peer.link_layer,
            peer.mtu,
            peer.max_reads_in,
            timeout,
            retries,
            rnr_retries,
            traffic_class,
            service_level,
        )

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
        if immediate is not None and not 0 <= immediate < 1 << 32:
            raise InvalidArgument(f"{op}: immediate must be of 32 bits, got {immediate}")
        token = next(self.queue._tokens)
        columns = _columns(ranges, op)
        self._handle.submit(reads, region._handle, remote.handle, *columns, immediate, token)
        return token


def _columns(ranges: Ranges, op: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if isinstance(ranges, tuple) and len(ranges) == 3 and isinstance(ranges[0], np.ndarray):
        return tuple(np.ascontiguousarray(column, np.uint64) for column in ranges)  # type: ignore
    try:
        listed = [(index(local), index(there), index(size)) for local, there, size in ranges]
        rows = np.array(listed, dtype=np.uint64).reshape(-1, 3)
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgument(
            f"{op}: ranges must be (local address, remote address, bytes) each, integers, "
            "none of them negative"
        ) from None
    local, there, sizes = (np.ascontiguousarray(rows[:, i]) for i in range(3))
    return local, there, sizes
