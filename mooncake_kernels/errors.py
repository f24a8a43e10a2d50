"""The errors that users see, named by who can act on them.

A message reads ``op: argument must be <what>, got <value>``, with Python's argument names.
A failed system call is a plain :class:`OSError` with its errno.
"""


class InvalidArgument(ValueError):
    """An argument is wrong; the message names it, what it must be, and what it was."""


class ChecksumError(ValueError):
    """A block does not hold what its checksum says; the message names the block."""


class Unavailable(RuntimeError):
    """The hardware, driver or library is not on this machine; the message says why."""


class CudaError(RuntimeError):
    """A CUDA call failed."""


class TransferError(RuntimeError):
    """A transfer failed, or its deadline passed.

    Attributes:
        peer: name of the other side.
        cause: what went wrong, in one phrase.
        num_bytes_done: payload bytes that the other side has confirmed; more may have arrived.
        num_bytes_total: payload bytes of the whole request.
        timed_out: whether it ended because its deadline passed.
    """

    def __init__(
        self,
        peer: str,
        cause: str,
        num_bytes_done: int = 0,
        num_bytes_total: int = 0,
        timed_out: bool = False,
    ):
        self.peer = peer
        self.cause = cause
        self.num_bytes_done = num_bytes_done
        self.num_bytes_total = num_bytes_total
        self.timed_out = timed_out
        confirmed = f" ({num_bytes_done} of {num_bytes_total} bytes confirmed)"
        super().__init__(f"transfer with {peer}: {cause}{confirmed if num_bytes_total else ''}")

    def __reduce__(self) -> tuple[type, tuple[str, str, int, int, bool]]:
        """Keep all fields when an executor passes it to another process."""
        parts = (self.peer, self.cause, self.num_bytes_done, self.num_bytes_total, self.timed_out)
        return type(self), parts
