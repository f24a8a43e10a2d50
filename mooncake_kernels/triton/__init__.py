"""Triton kernels: for GPUs without nvcc's kernels, and for TRITON_INTERPRET=1 on the CPU."""
