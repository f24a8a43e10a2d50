"""GPU memory filled with what a test wants."""

import numpy as np

from ...fake_cuda.gpus import Memory


def on_gpu(gpus, data: np.ndarray, device: int = 0) -> Memory:
    memory = gpus.allocate(max(len(data), 1), device).part(0, len(data))
    memory.put(data)
    return memory
