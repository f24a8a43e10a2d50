"""``MooncakeHostMemAllocator``: host memory for buffers, by its address."""

import logging
import threading
from numbers import Integral
from typing import ClassVar

import torch

from mooncake_kernels.buffers import shared_memory
from mooncake_kernels.errors import InvalidArgument

from ..codes import as_natural

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
            RuntimeError: the size is not a positive integer, or there is not enough memory.
        """
        try:
            memory = shared_memory(as_natural("size", size, minimum=1))
        except (InvalidArgument, OSError, MemoryError) as error:
            raise RuntimeError(f"alloc: {error}") from error
        with self._lock:
            self._allocated[memory.data_ptr()] = memory
        return memory.data_ptr()

    def free(self, address: int) -> int:
        """Free what ``alloc`` returned, once it is not registered any more.

        Returns:
            0; -1 for any other address.
        """
        with self._lock:
            known = isinstance(address, Integral) and address in self._allocated
            memory = self._allocated.pop(int(address)) if known else None
        if memory is None:
            log.error("free: address must be what alloc has returned, got %.80r", address)
        return -1 if memory is None else 0
