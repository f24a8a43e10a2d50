"""Whether the disk of a tier is writable, as far as is known."""

import time

from mooncake_kernels.errors import TransferError

from .stats import log


class Health:
    """After an error nothing is written for some time; then writing is retried.

    Args:
        path: of the file, for the log.
        retry_s: for how long, in seconds.

    Attributes:
        error: the last one; empty if a write succeeded since.
        num_errors: how many there were.
    """

    def __init__(self, path: str, retry_s: float):
        self._path = path
        self._retry_s = retry_s
        self._until = 0.0
        self.error = ""
        self.num_errors = 0

    @property
    def is_writable(self) -> bool:
        return not self.error or time.monotonic() >= self._until

    def failed(self, error: TransferError) -> None:
        self.error, self._until = error.cause, time.monotonic() + self._retry_s
        self.num_errors += 1
        log.warning("%s: nothing is written for %g s: %s", self._path, self._retry_s, error.cause)

    def succeeded(self) -> None:
        if self.error:
            log.warning("%s can be written again", self._path)
            self.error = ""
