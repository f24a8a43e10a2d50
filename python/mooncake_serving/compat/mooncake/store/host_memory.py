"""``MooncakeHostMemAllocator``: host memory for buffers, by its address."""

import logging
import threading
from typing import ClassVar

import torch

from mooncake_kernels.buffers import shared_memory

log = logging.getLogger(__package__)


class MooncakeHostMemAllocator:
    """Allocates memory that engines of this machine copy to and from without a system call.

    Thread-safe. Memory that is not freed lives as long as the process, as Mooncake's does.
    """

    _allocated: ClassVar[dict[int, torch.Tensor]] = {}  # by address, of all allocators
    _lock = threading.Lock()

    def alloc(self, size: int) -> int:
        """Return the address of ``size`` zeroed bytes.

        Raises:
            InvalidArgument: the size is not a positive integer.
            OSError: there is not enough memory.
        """
        memory = shared_memory(size)
        with self._lock:
            self._allocated[memory.data_ptr()] = memory
        return memory.data_ptr()

    def free(self, address: int) -> int:
        """Free what ``alloc`` returned, once it is not registered any more.

        Returns:
            0; -1 for any other address.
        """
        with self._lock:
            memory = self._allocated.pop(address, None)
        if memory is None:
            log.error("free: address must be what alloc has returned, got %.80r", address)
        return -1 if memory is None else 0
