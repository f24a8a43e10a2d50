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

    Keep a reference, even if only the peer reads and writes: a garbage-collected one is closed.

    Attributes:
        queue: reports its completions.
        number: on its NIC.
        endpoint: what the peer connects to; changes with ``reset()``.
        connected: whether it is connected, and no transfer has failed since.
    """

    def __init__(self, handle: Any, queue: "CompletionQueue"):
        super().__init__(handle)
        self.queue = queue
        self.number: int = handle.number

    @property
    def endpoint(self) -> Endpoint:
        """What the peer connects to; changes with ``reset()``."""
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
            retries: after these a transfer fails, 67 ms each or more; 7 is unlimited on soft-RoCE.
            rnr_retries: while the peer has no room for an immediate; 7 is unlimited.
            traffic_class: of packets: DSCP and ECN on RoCE.
            service_level: on InfiniBand.

        Raises:
            InvalidArgument: the ends do not match, a number is out of range, or one of the ends was
                connected before, if only in an attempt that failed, and not ``reset()`` since.
            OSError: the device refuses, for instance because it has no route.
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
        """Prepare it for another connection: after a failure, or to another peer.

        Transfers in flight end as ``"closed"``. Both sides must reset and exchange their new
        ``endpoint`` before either connects: a side that did not would acknowledge what the other
        sends as duplicates, and not write it.

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

        Ranges that are consecutive on the remote side are sent as one request, which gathers its
        parts. The memory must not change until the completion has arrived. The queue holds the
        region until it has reported that.

        Args:
            region: local memory, of the same device.
            remote: the peer's.
            ranges: (local address, remote address, bytes) of each; or three uint64 arrays.
            immediate: 32 bits that the peer's queue reports when all of it is written.

        Returns:
            The token of its completion.

        Raises:
            InvalidArgument: a range is outside its region (named by its index), an access right is
                missing, or the queue pair is not connected or is closed.
        """
        return self._submit(False, region, remote, ranges, immediate)

    def read(self, region: Region, remote: RemoteRegion, ranges: Ranges) -> int:
        """Read ranges of the peer's memory into a region; otherwise like ``write()``."""
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
        token = self.queue._announce(region)
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
