"""Sequential writes of pages from two halves of memory: one is filled while one is written."""

import numpy as np

from mooncake_kernels.transfer import Ticket

from .disk import Disk
from .layout import PAGE


class Appender:
    """Writes pages in sequence, from the offset of ``seek`` on. For one thread at a time.

    After an exception during a wait nothing is in flight, and what was added since the last
    ``flush`` is forgotten. A caller that lets any other exception pass calls ``forget``.

    Args:
        disk: what is written.
        half_bytes: size of each half, the first two parts of its staging memory; whole pages.

    Attributes:
        num_bytes: written in total.
    """

    def __init__(self, disk: Disk, half_bytes: int):
        self._disk = disk
        self._half_bytes = half_bytes
        self._tickets: list[Ticket | None] = [None, None]
        self._half = 0  # the half that is being filled
        self._filled = 0
        self._offset = 0  # in the file, of the half that is being filled
        self.num_bytes = 0

    def seek(self, offset: int) -> None:
        """Continue elsewhere; everything added must have been flushed."""
        self._offset = offset

    def add(self, data: np.ndarray) -> None:
        """Append ``[n]`` uint8, and zeros up to the next page.

        Raises:
            TransferError: something added before cannot be written.
        """
        while len(data):
            if not self._filled:
                self._wait(self._half)  # for the last write from this half
            room = self._half_bytes - self._filled
            part, data = data[:room], data[room:]
            self._staged(len(part))[:] = part
            self._filled += len(part)
            if self._filled == self._half_bytes:
                self._submit()
        self._staged(-self._filled % PAGE)[:] = 0
        self._filled += -self._filled % PAGE
        if self._filled == self._half_bytes:
            self._submit()

    def flush(self) -> None:
        """Wait until everything added is written.

        Raises:
            TransferError: something cannot be written.
        """
        if self._filled:
            self._submit()
        self._wait(0)
        self._wait(1)

    def forget(self) -> None:
        """End what is in flight, and forget what was added."""
        for half, ticket in enumerate(self._tickets):
            if ticket is not None:
                ticket.cancel()  # it waits for what the disk has begun
                self._tickets[half] = None
        self._filled = 0

    def _staged(self, num_bytes: int) -> np.ndarray:
        start = self._half * self._half_bytes + self._filled
        return self._disk.staging[start : start + num_bytes]

    def _submit(self) -> None:
        start = self._half * self._half_bytes
        self._tickets[self._half] = self._disk.write(self._offset, start, self._filled)
        self.num_bytes += self._filled
        self._offset += self._filled
        self._filled = 0
        self._half = 1 - self._half

    def _wait(self, half: int) -> None:
        ticket = self._tickets[half]
        if ticket is None:
            return
        try:
            ticket.wait()
        except BaseException:  # including Ctrl-C, after which the write would continue
            self.forget()
            raise
        self._tickets[half] = None
