"""Completion queues: the outcomes of transfers."""

import itertools
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .. import _host
from .._arguments import as_int32, as_integer, as_seconds
from ..errors import FailureKind, InvalidArgument, TransferError
from ._handles import SIGNAL_CHECK_S, Handle
from .queue_pair import QueuePair
from .region import Region

if TYPE_CHECKING:
    from .device import Device

_MAX_WORK = 4096


@dataclass(frozen=True)
class Completion:
    """A finished operation: a transfer of this side, or a peer's that came with an immediate.

    Attributes:
        token: what ``write()`` or ``read()`` returned; None for an immediate.
        qp_num: of which queue pair.
        status: ``"success"``, or why it failed, in verbs' words; ``"closed"`` for one that was
            unfinished when its queue pair was closed or reset.
        ok: whether it succeeded.
        vendor_error: the NIC vendor's error code.
        immediate: what the peer sent along; None for a transfer.
        num_bytes: for a transfer, the bytes certain to be delivered; for an immediate, the bytes
            written by the request that carried it.
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
            kind = FailureKind.DEVICE
            raise TransferError(f"queue pair {self.qp_num}", self.status, self.num_bytes, kind=kind)


class CompletionQueue(Handle):
    """Reports finished operations. Made by ``device.completion_queue()``; thread-safe."""

    def __init__(self, handle: Any, device: "Device"):
        super().__init__(handle)
        self.device = device
        self._pid = os.getpid()
        self._tokens = itertools.count(1)
        # Taken by itself, not by `with self._changed`: that runs Python, where the handler of a
        # signal may raise and leave it held.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_sleeping = False  # a thread, until the NIC has something
        # The region of each transfer whose completion was not yet reported: until then the NIC may
        # use its memory, which no one else may hold.
        self._untold: dict[int, Region | None] = {}
        self._kept: list[Completion] = []  # completions that wait() found while waiting for another

    def queue_pair(
        self,
        *,
        port: int = 1,
        gid_index: int | None = None,
        max_sends: int = 256,
        max_sges: int = 16,
        max_immediates: int = 0,
    ) -> QueuePair:
        """Make one end of a connection, not yet connected.

        Args:
            port: of the NIC.
            gid_index: of the port's address; None: a RoCE v2 address before a v1, IPv4 before IPv6.
            max_sends: work requests in flight; further ones wait in this process.
            max_sges: ranges of local memory that a work request gathers, if the NIC supports it.
            max_immediates: how many of the peer's may wait to be polled; with 0 a peer that sends
                one waits forever. max_sends + max_immediates count towards the queue's depth.

        Raises:
            InvalidArgument: a number is out of range, or the queue is too short.
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
        """Return finished operations; sleep until there is one or the time is up.

        Polling also posts requests that its queue pairs had no room for: poll while transfers run.

        Args:
            timeout_s: how long to wait; 0: not at all.
            spin_s: how long of that, at its beginning, to busy-poll, which occupies a processor and
                saves the wake-up time.

        Raises:
            InvalidArgument: the queue is closed, or is closed during the wait.
        """
        timeout_s = as_seconds("poll", "timeout_s", timeout_s, minimum=0)
        spin_s = as_seconds("poll", "spin_s", spin_s, minimum=0)
        return self._await(self._take, timeout_s, spin_s)

    def wait(self, token: int, *, timeout_s: float = 30.0, spin_s: float = 0.0) -> Completion:
        """Poll until a transfer has finished, check it and return its completion.

        Other completions found meanwhile are kept: for ``poll()``, and for threads that wait for
        them.

        Raises:
            TransferError: it failed.
            TimeoutError: the time is up; the transfer continues.
            InvalidArgument: it is not a transfer of this queue, its completion was already
                reported, or the queue is closed.
        """
        timeout_s = as_seconds("wait", "timeout_s", timeout_s, minimum=0)
        spin_s = as_seconds("wait", "spin_s", spin_s, minimum=0)
        found = self._await(lambda: self._find(token), timeout_s, spin_s)
        if not found:
            raise TimeoutError(f"wait: transfer {token} is not over after {timeout_s} s")
        found[0].check()
        return found[0]

    def close(self) -> None:
        """Release it, after its queue pairs. Idempotent; no effect in a forked child."""
        super().close()
        if os.getpid() != self._pid:
            return  # a thread of the parent may have held the lock when it forked
        with self._lock:  # tokens stay known, to be told that the queue is closed
            held, self._untold = self._untold, dict.fromkeys(self._untold)
        held.clear()

    def _announce(self, region: Region) -> int:
        """Return the token of a transfer about to be posted, from or to that region."""
        with self._lock:
            token = next(self._tokens)
            self._untold[token] = region
            return token

    def _withdraw(self, token: int) -> None:
        """Drop a token whose transfer was not posted."""
        with self._lock:
            self._untold.pop(token, None)

    def _await(
        self, take: Callable[[], list[Completion]], timeout_s: float, spin_s: float
    ) -> list[Completion]:
        """Poll until `take` finds what it wants among the kept ones, or the time is up.

        One thread at a time sleeps until the NIC has something; the others wait for what it, or
        whoever else polls, puts aside.
        """
        begin = time.monotonic()
        with self._lock:
            try:
                while True:
                    self._poll()
                    found, now = take(), time.monotonic()
                    left_s = begin + timeout_s - now
                    if found or left_s <= 0:
                        break
                    if self._is_sleeping:
                        self._changed.wait(min(left_s, threading.TIMEOUT_MAX))
                    else:
                        spin_left_s = max(begin + spin_s - now, 0.0)
                        self._sleep(min(left_s, SIGNAL_CHECK_S), spin_left_s)
            finally:
                if not self._is_sleeping:
                    self._changed.notify()  # who waits takes over
            ended = [self._untold.pop(completion.token or 0, None) for completion in found]
        del ended  # not under the lock: this may close regions
        return found

    def _sleep(self, timeout_s: float, spin_s: float) -> None:
        self._is_sleeping = True
        try:
            self._lock.release()
            self._handle.wait(timeout_s, spin_s)
        finally:
            try:
                self._lock.acquire()
            finally:  # even if a signal's handler raised
                self._is_sleeping = False

    def _poll(self) -> None:
        """Put aside what is finished, and tell those who wait for it."""
        new = self._handle.poll(_MAX_WORK)
        if not new:
            return
        self._kept += map(_completion, new)
        self._changed.notify_all()
        if self._is_sleeping:
            self._handle.wake()

    def _take(self) -> list[Completion]:
        """Take all completions."""
        found, self._kept = self._kept, []
        return found

    def _find(self, token: int) -> list[Completion]:
        """Take that transfer's completion, if it has finished."""
        if token not in self._untold:
            raise InvalidArgument(
                "wait: token must be of a transfer of this queue whose end was not told yet, "
                f"got {token!r}"
            )
        for i, completion in enumerate(self._kept):
            if completion.token == token:
                return [self._kept.pop(i)]
        return []


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
