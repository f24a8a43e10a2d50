"""Host memory that stands in for GPU memory, for data that comes from a disk or a connection."""

from collections.abc import Sequence

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer, copy_from_host


class Landing:
    """Buffers in host memory: the given ones, or stand-ins for those on GPUs.

    Attributes:
        buffers: as many as were given, of the same sizes.
    """

    def __init__(self, given: Sequence[Buffer]):
        self._given = given
        self._is_here = all(buffer.is_host for buffer in given)
        self.buffers = (
            given
            if self._is_here
            else [b if b.is_host else as_buffer(np.empty(b.num_bytes, np.uint8)) for b in given]
        )

    def deliver(self, num_bytes: int) -> None:
        """Copy this many bytes, from the first buffer on, to their destination.

        Raises:
            Unavailable, CudaError: of the driver.
        """
        if self._is_here:
            return
        for given, landed in zip(self._given, self.buffers, strict=True):
            size = min(landed.num_bytes, num_bytes)
            if landed is not given:
                copy_from_host(landed.owner[:size], [given])
            num_bytes -= size
