"""GPU memory for tests: of a fake driver, or torch's on a real GPU."""

import os

import numpy as np
import torch

from mooncake_kernels.buffers import as_buffer

from ..transfer.support import UNTOUCHED

WORLD = os.environ.get("MK_TEST_WORLD", "")
IS_FAKE = WORLD == "fake_gpu"


class Memory:
    """Memory of a GPU, and its bytes."""

    def __init__(self, buffer):
        self.buffer = buffer  # what is registered
        self.address = as_buffer(buffer).address
        self.num_bytes = as_buffer(buffer).num_bytes

    def part(self, begin: int, end: int) -> "Memory":
        return Memory(self.buffer.part(begin, end) if IS_FAKE else self.buffer[begin:end])

    def put(self, data: np.ndarray) -> None:
        if IS_FAKE:
            self.buffer.bytes[:] = data
        else:
            self.buffer.copy_(torch.from_numpy(data))
            torch.cuda.synchronize()

    def get(self) -> np.ndarray:
        """The present bytes: on the fake GPU without the copies that were not waited for."""
        return self.buffer.bytes.copy() if IS_FAKE else self.buffer.cpu().numpy()


class FakeGpus:
    def __init__(self):
        from .driver import FakeDriver

        self.driver = FakeDriver()
        self.count = 2

    def allocate(self, num_bytes: int, device: int = 0, exportable: bool = True) -> Memory:
        memory = Memory(self.driver.allocate(num_bytes, device=device, exportable=exportable))
        memory.put(np.full(num_bytes, UNTOUCHED, np.uint8))
        return memory


class TorchGpus:
    driver = None

    def __init__(self):
        self.count = torch.cuda.device_count()

    def allocate(self, num_bytes: int, device: int = 0, exportable: bool = True) -> Memory:
        place = f"cuda:{device % self.count}"
        memory = torch.full((num_bytes,), UNTOUCHED, dtype=torch.uint8, device=place)
        torch.cuda.synchronize(place)  # transfers do not wait for torch's stream
        return Memory(memory)


GPUS = FakeGpus() if IS_FAKE else TorchGpus()
