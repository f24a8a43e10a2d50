"""Requests that CUDA streams carry out, each when its stream arrives at it."""

import weakref

import numpy as np

from .. import _host
from ..errors import TransferError, Unavailable
from .arguments import Integers, as_column
from .engine import TransferEngine
from .handles import Peer


class StreamTransfers:
    """Those of one engine. Thread-safe.

    A stream waits for a transfer in a host function, which must not depend on other work of a GPU
    (csrc/transfer/gpu/host_function.h says why). So only what no GPU has to copy can be moved so:
    memory of the host, at both ends; and any memory if the engine reaches the peer by NICs, and can
    do so in no other way.
    """

    def __init__(self, engine: TransferEngine):
        self._engine = engine
        self._transfers = _host.StreamTransfers(engine._engine)
        self._host_ranges: weakref.WeakKeyDictionary[Peer, np.ndarray] = weakref.WeakKeyDictionary()

    def enqueue(
        self,
        stream: int,
        peer: Peer,
        local_addresses: Integers,
        remote_addresses: Integers,
        sizes: Integers,
        *,
        reads: bool,
        deadline_s: float,
        key: int,
    ) -> None:
        """Enqueue a request: it begins when the stream arrives there, which goes on when it ends.

        Args:
            stream: a CUDA stream's handle.
            peer: one that the engine has opened, and keeps open until the request has ended.
            local_addresses: as for ``write_blocks``, like the next two.
            remote_addresses: as for ``write_blocks``.
            sizes: ``[n]`` integers.
            reads: from the peer; else to it.
            deadline_s: seconds from the moment that the stream arrives.
            key: what ``take`` calls it.

        Raises:
            TransferError: of an earlier one, as ``check``; or the peer does not say where its
                memory is. This and all below: nothing was enqueued.
            Unavailable: a GPU would have to copy, or the peer has nothing at an address; there is
                no CUDA context; the stream is being captured into a graph.
            InvalidArgument: as for ``write_blocks``.
            CudaError: from the driver.
        """
        op = "read_blocks" if reads else "write_blocks"
        self._engine._check_peer(op, peer)
        local = as_column(op, "local_addresses", local_addresses)
        remote = as_column(op, "remote_addresses", remote_addresses)
        lengths = as_column(op, "sizes", sizes)
        if not self._engine._engine.uses_only_nics(peer._peer):
            self._check_far(op, peer, remote)
        self._transfers.enqueue(stream, peer._peer, op, local, remote, lengths, deadline_s, key)

    def take(self, timeout_s: float) -> list[tuple[int, str]]:
        """Those that have ended: their keys, and why they failed; waits until there is one."""
        return self._transfers.take(timeout_s)

    def check(self) -> None:
        """Raise ``TransferError`` for the first failure, unless it was reported before.

        Those enqueued before then do not begin after the failure, and fail as well.
        """
        self._transfers.check()

    def _check_far(self, op: str, peer: Peer, remote: np.ndarray) -> None:
        # An address is of the host for good: the peer is asked only about unknown ones.
        addresses = remote.astype(np.uint64)
        known = self._host_ranges.get(peer)
        if known is not None and _contains(known, addresses).all():
            return
        try:
            regions = self._engine.regions(peer)
        except TransferError as error:
            cause = f"it must say which of its memory is of the host: {error.cause}"
            raise TransferError(peer.name, cause, kind=error.kind) from None
        ranges = [
            (region.address, region.address + region.num_bytes)
            for region in regions
            if region.location.startswith("cpu")
        ]
        host = self._host_ranges[peer] = np.array(sorted(ranges), np.uint64).reshape(-1, 2)
        others = addresses[~_contains(host, addresses)]
        if len(others):
            raise Unavailable(
                f"{op}: memory of the peer must be of its host, and registered there, for "
                f"{peer.name} is not reached by NICs alone, got {int(others[0]):#x}"
            )


def _contains(ranges: np.ndarray, addresses: np.ndarray) -> np.ndarray:
    """Which of the addresses are in one of the sorted ranges."""
    if not len(ranges):
        return np.zeros(len(addresses), bool)
    index = np.searchsorted(ranges[:, 0], addresses, side="right") - 1
    return (index >= 0) & (addresses < ranges[index, 1])
