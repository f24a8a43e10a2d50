"""Host memory that stands in for GPU memory, for data that comes from a disk or a connection."""

from collections.abc import Sequence

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer, copy_from_host


class BounceBuffers:
    """Buffers in host memory: the given ones, or stand-ins for those on GPUs.

    Attributes:
        buffers: as many as were given, of the same sizes.
    """

    def __init__(self, given: Sequence[Buffer]):
        self._given = given
        self.buffers = given
        for buffer in given:
            if not buffer.is_host:
                self.buffers = [_on_host(other) for other in given]
                break

    def deliver(self, num_bytes: int) -> None:
        """Copy this many bytes, from the first buffer on, to their destination.

        Raises:
            Unavailable, CudaError: of the driver.
        """
        if self.buffers is self._given:
            return
        for given, bounced in zip(self._given, self.buffers, strict=True):
            size = min(bounced.num_bytes, num_bytes)
            if bounced is not given:
                copy_from_host(bounced.owner[:size], [given])
            num_bytes -= size


def _on_host(buffer: Buffer) -> Buffer:
    return buffer if buffer.is_host else as_buffer(np.empty(buffer.num_bytes, np.uint8))
