"""Queue pairs: connections, and the reads and writes on them."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from .._arguments import as_instance, as_int32, as_integer, as_integers, as_triples
from ..errors import InvalidArgument
from ._handles import Handle
from .endpoint import Endpoint, endpoint_of
from .region import Region, RemoteRegion

if TYPE_CHECKING:
    from .completion_queue import CompletionQueue

Ranges = Iterable[tuple[int, int, int]] | tuple[np.ndarray, np.ndarray, np.ndarray]


class QueuePair(Handle):
    """One end of a reliable connection (RC). Made by ``queue.queue_pair()``; thread-safe.

    Hold it, also where only the peer reads and writes: what is garbage-collected is closed.

    Attributes:
        queue: which tells what is over.
        number: on its NIC.
        endpoint: what the peer connects to; another after ``reset()``.
        connected: whether it is, and has not failed.
    """

    def __init__(self, handle: Any, queue: "CompletionQueue"):
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
        columns = _columns(op, ranges)
        token = self.queue._announce()
        try:
            self._handle.submit(reads, region._handle, remote.handle, *columns, immediate, token)
        except BaseException:
            self.queue._withdraw(token)
            raise
        return token


def _columns(op: str, ranges: Ranges) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    if isinstance(ranges, tuple) and ranges and all(isinstance(c, np.ndarray) for c in ranges):
        columns = [as_integers(op, f"ranges[{i}]", c, "[n]") for i, c in enumerate(ranges)]
        if len(columns) != 3 or len({column.shape for column in columns}) != 1:
            shapes = [column.shape for column in columns]
            raise InvalidArgument(f"{op}: ranges must be three arrays of [n], got {shapes}")
        if columns[0].ndim == 1:
            local, there, sizes = map(np.ascontiguousarray, columns)
            return local, there, sizes
    return as_triples(op, "ranges", ranges, "(local address, remote address, bytes)")
