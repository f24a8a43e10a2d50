"""Transfers between memory of agents, and the handles that callers hold of them."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mooncake_kernels import config
from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import Peer, Ticket, TransferEngine, take_addresses

from . import dropped
from .descriptors import nixl_mem_t
from .errors import (
    LOST,
    as_nixl,
    nixlInvalidParamError,
    nixlNotPostedError,
    nixlRepostActiveError,
)
from .logging import get_logger, shown
from .remotes import Remote

S_PER_BYTE = 1e-8  # that a transfer may take, in addition to the deadline: 100 MB/s
# Small transfers within the machine are copied by the thread that posts them, as the engine lets a
# thread do that waits. One that polls would have to wake another thread, which takes longer.
_MAX_COPIED_BYTES = 2 << 20
_MAX_COPYING_S = 1e-3
_WITHIN_MACHINE = ("local", "shm")
_log = get_logger(__name__)


@dataclass
class nixlXferTelemetry:  # noqa: N801
    """How a transfer went. Times are in microseconds.

    Attributes:
        startTime: when it was posted, on the clock of ``time.monotonic()``.
        postDuration: how long the call that posted it took.
        xferDuration: from then until its end, not until the caller noticed.
        totalBytes: its bytes.
        descCount: its descriptors.
    """

    startTime: int = 0  # noqa: N815
    postDuration: int = 0  # noqa: N815
    xferDuration: int = 0  # noqa: N815
    totalBytes: int = 0  # noqa: N815
    descCount: int = 0  # noqa: N815


@dataclass(eq=False, slots=True)
class Side:
    """Descriptors of one side of transfers, checked.

    Attributes:
        kind: of memory.
        addresses: ``[n]`` uint64; of files, offsets.
        sizes: ``[n]`` uint64 bytes, or one number if all are equal.
        devices: ``[n]`` uint64, of files; else None.
        files: what these stood for when this was prepared; None: it is of memory.
        remote: whose memory it is; None: the agent's own, as the local side.
    """

    kind: nixl_mem_t
    addresses: np.ndarray
    sizes: np.ndarray | int
    devices: np.ndarray | None = None
    remote: Remote | None = None
    files: Mapping[int, Any] | None = None

    @classmethod
    def of(cls, kind: nixl_mem_t, rows: np.ndarray, remote: Remote | None) -> "Side":
        """The columns of ``[n, 3]`` rows."""
        sizes: np.ndarray | int = rows[:, 1].copy()
        if len(rows) and (rows[:, 1] == rows[0, 1]).all():
            sizes = int(rows[0, 1])
        is_file = kind == nixl_mem_t.FILE_SEG
        devices = rows[:, 2].copy() if is_file else None
        return cls(kind, rows[:, 0].copy(), sizes, devices, remote)

    def check_matches(self, op: str, far: "Side") -> None:
        """Refuse a remote side that has not the same lengths, and lengths of 0.

        Raises:
            nixlInvalidParamError: the message names the descriptor.
        """
        count, others = len(self.addresses), len(far.addresses)
        if count != others or not count:
            raise nixlInvalidParamError(
                f"{op}: both sides must have as many descriptors, and at least one, got "
                f"{count} local and {others} remote"
            )
        are_equal = isinstance(self.sizes, int) and isinstance(far.sizes, int)
        if are_equal and self.sizes == far.sizes > 0:
            return  # usually, and the rest takes as long as a small transfer
        differ = np.broadcast_to(np.not_equal(self.sizes, far.sizes), count)
        if differ.any():
            bad = int(np.argmax(differ))
            sizes = [int(np.broadcast_to(side.sizes, count)[bad]) for side in (self, far)]
            raise nixlInvalidParamError(
                f"{op}: descriptor {bad} must be as long on both sides, got {sizes[0]} bytes local "
                f"and {sizes[1]} bytes remote"
            )
        if not np.all(self.sizes):
            bad = int(np.argmin(np.broadcast_to(self.sizes, count)))
            raise nixlInvalidParamError(f"{op}: descriptor {bad} must have bytes, got 0 bytes")

    def take(self, op: str, argument: str, indices: Any) -> "Side":
        """Those of the indices.

        Raises:
            nixlInvalidParamError: one is no integer or out of range.
        """
        try:
            addresses = take_addresses(self.addresses, indices)
            sizes = self.sizes
            if not isinstance(sizes, int):
                sizes = take_addresses(sizes, indices)
            devices = None if self.devices is None else take_addresses(self.devices, indices)
        except InvalidArgument as error:
            text = str(error).removeprefix("take_addresses: indices")
            raise nixlInvalidParamError(f"{op}: {argument}{text}") from None
        return Side(self.kind, addresses, sizes, devices, self.remote, self.files)


class Job(Protocol):
    """What a transfer handle holds: one direction, memory and a target."""

    backend_kind: nixl_mem_t

    @property
    def remote(self) -> Remote | None:
        """The peer; None: the target is files."""

    def post(self, pieces: list[bytes]) -> str:
        """Start it, with a notification after the data. Returns ``state()``, or ``PROC``."""

    def state(self) -> str:
        """``DONE``, ``PROC`` or ``ERR``."""

    def cancel(self) -> None:
        """End it; local memory is no longer touched when this returns."""

    def telemetry(self) -> nixlXferTelemetry:
        """How it went, once it is done."""


class MemoryTransfer:
    """A request between this agent's memory and that of another, or its own."""

    backend_kind = nixl_mem_t.DRAM_SEG

    # Until it is posted:
    _state = ""
    _pieces: Sequence[bytes] = ()
    _notices: Sequence[Ticket] = ()  # of all pieces but the last, which goes with the data
    _ticket: Ticket | None = None  # None: it waits for the peer to be opened
    _error: Exception | None = None
    _begin_s = _posted_s = _end_s = 0.0

    def __init__(
        self,
        engine: TransferEngine,
        operation: str,
        near: Side,
        far: Side,
        remote: Remote,
        lost: Callable[[Remote, Exception], None],
    ):
        self._notify = engine.write
        self._move = engine.read_blocks if operation == "READ" else engine.write_blocks
        self._columns = near.addresses, far.addresses, near.sizes
        self.remote = remote
        self._lost = lost
        sizes = near.sizes
        num_bytes = sizes * len(near.addresses) if isinstance(sizes, int) else int(sizes.sum())
        self._num_bytes = num_bytes
        is_of_hosts = near.kind is far.kind is nixl_mem_t.DRAM_SEG
        self._may_copy = is_of_hosts and num_bytes <= _MAX_COPIED_BYTES
        self._lock = threading.Lock()  # between a thread that starts it, and one that ends it

    def post(self, pieces: list[bytes]) -> str:
        """Start it. Returns ``state()``; of what was just sent to another machine ``PROC``.

        Raises:
            nixlRepostActiveError: it is still running.
            nixlRemoteDisconnectError, nixlBackendError, ...: it has failed.
        """
        with self._lock:
            if self._state == "PROC" and self.state() == "PROC":
                raise nixlRepostActiveError(
                    "transfer: handle must not be active, it is still running"
                )
            self._begin_s = time.monotonic()
            self._pieces, self._notices, self._ticket, self._error = pieces, (), None, None
            self._state = "PROC"
            peer = self.remote.peer
            if peer is not None:
                self._submit(peer)
        state = None  # as far as it is known by now
        if peer is None:
            self.remote.post(self)
        elif self._may_copy and (ticket := self._ticket) is not None:
            state = "PROC"
            if peer.transport in _WITHIN_MACHINE:
                try:
                    ticket.wait(_MAX_COPYING_S)
                    state = "DONE"
                except TimeoutError:
                    pass
                except TransferError as error:
                    self._error = error
        self._end_s = self._posted_s = time.monotonic()
        if state is None or self._notices or self._error is not None:
            return self.state()
        if state == "DONE":
            self._state = state
        return state

    def start(self, peer: Peer) -> None:
        """Submit it."""
        with self._lock:
            if self._state == "PROC":  # else it was cancelled meanwhile
                self._submit(peer)
                self._end_s = time.monotonic()  # of one that is over by now

    def _submit(self, peer: Peer) -> None:
        deadline_s = config.current().deadline_s + self._num_bytes * S_PER_BYTE
        notify = None
        try:
            if self._pieces:
                *others, notify = self._pieces
                for piece in others:
                    notice = self._notify(peer, [], notify=piece, deadline_s=deadline_s)
                    self._notices = (*self._notices, notice)
            self._ticket = self._move(peer, *self._columns, deadline_s=deadline_s, notify=notify)
        except Exception as error:  # noqa: BLE001 - state() raises it, whatever it is
            self._error = error

    def fail(self, error: Exception) -> None:
        """End it: the peer cannot be opened."""
        self._error = error

    def state(self) -> str:
        """``DONE``, ``PROC`` or ``ERR``.

        Raises:
            nixlNotPostedError: it was not posted.
            nixlRemoteDisconnectError, nixlBackendError, ...: it has failed; only once.
        """
        if self._state != "PROC":
            if not self._state:
                raise nixlNotPostedError("check_xfer_state: handle must have been posted")
            return self._state
        ticket = self._ticket
        if self._error is None:
            if ticket is None or not ticket.done:
                return "PROC"
            if self._notices and not all(notice.done for notice in self._notices):
                return "PROC"
            try:
                for notice in self._notices:
                    notice.wait()
                ticket.wait()
            except TransferError as failure:
                self._error = failure
        if ticket is not None and ticket.ended_s is not None:
            self._end_s = ticket.ended_s
        error = self._error
        if error is None:
            self._state = "DONE"
            return "DONE"
        self._state = "ERR"
        if isinstance(error, TransferError) and error.kind in LOST:
            self._lost(self.remote, error)
        _log.error("a transfer with agent %s failed: %s", shown(self.remote.name), shown(error))
        raise as_nixl(error) from error

    def cancel(self) -> None:
        """End it; local memory is no longer touched when this returns."""
        if self._state != "PROC":
            return
        with self._lock:
            was_active = self._state == "PROC"
            if was_active:
                self._state = "ERR"
        if was_active:
            for notice in self._notices:
                notice.cancel()
            if self._ticket is not None:
                self._ticket.cancel()

    def telemetry(self) -> nixlXferTelemetry:
        """How it went."""
        return nixlXferTelemetry(
            int(self._begin_s * 1e6),
            int((self._posted_s - self._begin_s) * 1e6),
            int((self._end_s - self._begin_s) * 1e6),
            self._num_bytes,
            len(self._columns[0]),
        )


class nixl_prepped_dlist_handle:  # noqa: N801
    """A list of descriptors that ``prep_xfer_dlist`` has checked."""

    __slots__ = ("side",)

    def __init__(self, side: Side):
        self.side: Side | None = side

    def __repr__(self) -> str:
        held = "released" if self.side is None else f"{len(self.side.addresses)} descriptors"
        return f"nixl_prepped_dlist_handle({held})"

    def release(self) -> None:
        """Free it. Transfers that were made of it go on. Idempotent."""
        self.side = None


class nixl_xfer_handle:  # noqa: N801
    """A transfer, from ``make_prepped_xfer`` or ``initialize_xfer``.

    One that is dropped while it runs is cancelled.
    """

    __slots__ = ("__weakref__", "job", "message")

    def __init__(self, job: Job, message: bytes | str):
        self.job: Job | None = job
        self.message = message

    def __repr__(self) -> str:
        return f"nixl_xfer_handle(released={self.job is None})"

    def release(self) -> None:
        """Free it; a running transfer is cancelled first. Idempotent.

        Local memory is no longer touched when this returns. What a cancelled write has sent may
        still land at the peer until this agent's next transfer to it.
        """
        job, self.job = self.job, None
        if job is not None:
            job.cancel()

    def __del__(self) -> None:
        job, self.job = self.job, None
        if job is not None:
            dropped.JOBS.cancel(job)


def job_of(op: str, handle: nixl_xfer_handle) -> Job:
    """What a handle holds, unless it is released."""
    if not isinstance(handle, nixl_xfer_handle) or handle.job is None:
        raise nixlInvalidParamError(
            f"{op}: handle must be a transfer that is not released, got {handle!r:.80}"
        )
    return handle.job


def side_of(op: str, handle: nixl_prepped_dlist_handle) -> Side:
    """The descriptors of a prepared list, unless it is released."""
    if not isinstance(handle, nixl_prepped_dlist_handle) or handle.side is None:
        raise nixlInvalidParamError(
            f"{op}: a side must be a prepared list that is not released, got {handle!r:.80}"
        )
    return handle.side
