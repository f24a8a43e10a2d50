"""The fake CUDA driver (gpu.cc), and memory of its GPUs as Python objects."""

import ctypes

import numpy as np

from .build import build_driver

NOT_SUPPORTED = 801
SYNC_MEMOPS = 0x80  # CU_CTX_SYNC_MEMOPS
PCIE = 1  # CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE
MIB = 1 << 20


class Driver:
    def __init__(self):
        path = build_driver()
        self.library = path and ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        if self.library:
            self.library.fake_cuda_allocate.restype = ctypes.c_uint64
            self.library.fake_cuda_get.restype = ctypes.c_int64

    def reset(self, active_device: int = -1) -> None:
        if self.library:
            self.library.fake_cuda_reset(active_device)

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self.library.fake_cuda_set(name.encode(), ctypes.c_int64(value))

    def get(self, name: str) -> int:
        return self.library.fake_cuda_get(name.encode())

    def allocate(self, *sizes: int, device: int = 0, is_virtual: bool = False) -> "GpuArray":
        """Mappings one after another; of host memory where a size is negative."""
        array = (ctypes.c_int64 * len(sizes))(*sizes)
        address = self.library.fake_cuda_allocate(device, array, len(sizes), int(is_virtual))
        return GpuArray(address, sum(map(abs, sizes)), device)

    def arrive(self) -> None:
        """Let the streams come to their host functions."""
        self.library.fake_cuda_arrive()

    def reallocate(self, array: "GpuArray") -> None:
        """Free it and reuse its address for another allocation."""
        self.library.fake_cuda_reallocate(ctypes.c_uint64(array.address))


class GpuArray:
    """Looks like a cupy array from outside."""

    def __init__(self, address: int, num_bytes: int, device: int):
        self.address = address
        self.num_bytes = num_bytes
        self.device = type("Device", (), {"id": device})()

    @property
    def __cuda_array_interface__(self) -> dict:
        data = (self.address, False)
        return {"shape": (self.num_bytes,), "typestr": "|u1", "data": data, "version": 3}

    def part(self, begin: int, end: int) -> "GpuArray":
        return GpuArray(self.address + begin, end - begin, self.device.id)

    @property
    def bytes(self) -> np.ndarray:
        """Its bytes, which this process can reach because the GPU is fake."""
        memory = (ctypes.c_uint8 * self.num_bytes).from_address(self.address)
        return np.frombuffer(memory, np.uint8)
