"""Triton kernels: for GPUs without nvcc's kernels, and for TRITON_INTERPRET=1 on the CPU."""

from ..extras import needed_from

with needed_from("gpu", __name__):
    import triton

INTERPRETED = triton.knobs.runtime.interpret  # triton.jit reads it once, in the modules here
