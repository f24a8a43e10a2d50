"""Host memory in the place of memory of GPUs, for what a disk or a connection brings."""

from collections.abc import Sequence

import numpy as np

from mooncake_kernels.buffers import Buffer, as_buffer, copy_from_host


class Landing:
    """Buffers in host memory: the given ones, or what stands for those on GPUs.

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
        """Copy so many bytes, from the first buffer on, to where they belong.

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
