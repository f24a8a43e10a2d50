"""The errors that users see, named by who can act on them.

A message reads ``op: argument must be <what>, got <value>``, with Python's argument names.
A failed system call is a plain :class:`OSError` with its errno.
"""

import enum
import reprlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np


class InvalidArgument(ValueError):
    """An argument is wrong; the message names it, what it must be, and what it was."""


class ChecksumError(ValueError):
    """A block does not hold what its checksum says; the message names the block."""


class Unavailable(RuntimeError):
    """The hardware, driver or library is not on this machine; the message says why."""


class PoolDamaged(Unavailable):
    """What the memory of an object pool holds contradicts itself, as after a stray write; the
    message names the pool and what. Its index is rebuilt before the next change, if that helps;
    otherwise the pool must be made anew.
    """


class CudaError(RuntimeError):
    """A CUDA call failed."""


class FailureKind(enum.IntEnum):
    """What a program may decide by of a :class:`TransferError`, whose text is for people.

    docs/transfer/transfer.md says what is known then, and what to do. The numbers are those of
    ``csrc/transfer/base/error.h``.
    """

    OTHER = 0  # unforeseen
    TIMED_OUT = 1  # its deadline passed
    CANCELLED = 2  # by its caller
    CHECKSUM = 3  # what arrived differs from what was sent
    GONE = 4  # no one is at the peer's address or name, or another engine is
    DISCONNECTED = 5  # the connection broke, and again when it was retried
    UNREACHABLE = 6  # the network does not lead to the peer
    BUSY = 7  # the peer has no room at the moment
    EXHAUSTED = 8  # no descriptor, thread, memory, local port or disk space is left
    REFUSED = 9  # the peer does not allow that: not registered, or without that right
    DENIED = 10  # by the secret, TLS, or another user's rights
    INCOMPATIBLE = 11  # the sides have no protocol, version or device in common
    INACCESSIBLE = 12  # memory that was registered, or of a file, is no longer there
    DEVICE = 13  # a GPU, NIC or disk failed
    CLOSED = 14  # this side closed the engine, peer or region meanwhile

    __str__ = enum.Enum.__str__  # FailureKind.GONE, where Python from 3.11 on says 4


class TransferError(RuntimeError):
    """A transfer failed, or its deadline passed.

    Attributes:
        peer: name of the other side.
        cause: what went wrong, in one phrase.
        num_bytes_done: payload bytes that the other side has confirmed; more may have arrived.
        num_bytes_total: payload bytes of the whole request.
        kind: a :class:`FailureKind`.
        timed_out: whether it ended because its deadline passed, which is one of the kinds.
        only_notification_missing: whether all bytes were confirmed, but not the notification.
        delivered: of a request for memory, a bool array, an item for each descriptor in their order
            (for blocks of pools, for each block of each plane): True if all of it is confirmed, and
            verified if it was to be; False if not, or not known, as in a part of the request that
            ended halfway. None for any other failure.
    """

    def __init__(
        self,
        peer: str,
        cause: str,
        num_bytes_done: int = 0,
        num_bytes_total: int = 0,
        kind: FailureKind = FailureKind.OTHER,
        only_notification_missing: bool = False,
        delivered: "np.ndarray | None" = None,
    ):
        self.peer = peer
        self.cause = cause
        self.num_bytes_done = num_bytes_done
        self.num_bytes_total = num_bytes_total
        self.kind = FailureKind(kind)
        self.only_notification_missing = only_notification_missing
        self.delivered = delivered
        confirmed = f"{num_bytes_done} of {num_bytes_total} bytes confirmed"
        missing = ", but not the notification" if only_notification_missing else ""
        told = f" ({confirmed}{missing})" if num_bytes_total else ""
        super().__init__(f"transfer with {peer}: {cause}{told}")

    @property
    def timed_out(self) -> bool:
        """Whether it ended because its deadline passed."""
        return self.kind is FailureKind.TIMED_OUT

    def __reduce__(self) -> tuple[type, tuple[Any, ...]]:
        """Keep all fields when an executor passes it to another process."""
        return type(self), (
            self.peer,
            self.cause,
            self.num_bytes_done,
            self.num_bytes_total,
            self.kind,
            self.only_notification_missing,
            self.delivered,
        )


def shown(value: Any, max_chars: int = 30) -> str:
    """A value for the text of an error: at most one line of it; of a text, about max_chars."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = max_chars
    try:
        return short.repr(value)
    except ValueError:  # Python does not print integers of more than 4300 digits
        return f"a huge {type(value).__name__}"
