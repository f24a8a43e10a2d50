"""Triton kernels: for GPUs without nvcc's kernels, and for TRITON_INTERPRET=1 on the CPU."""

import torch
import triton

from ..errors import Unavailable

INTERPRETED = triton.knobs.runtime.interpret  # triton.jit reads it once, in the modules here


def check_device(device: torch.device) -> None:
    """Raise Unavailable where no kernel runs: on the CPU without the interpreter."""
    if device.type == "cpu" and not INTERPRETED:
        raise Unavailable(
            "engine triton: CPU tensors need TRITON_INTERPRET=1 set before the import"
        )
