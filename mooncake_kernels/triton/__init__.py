"""Triton kernels: for GPUs without nvcc's kernels, and for TRITON_INTERPRET=1 on the CPU."""

try:
    import triton
except ModuleNotFoundError as missing:
    raise ModuleNotFoundError(
        f"{__name__}: {missing.name} is not installed: pip install 'mooncake-kernels[gpu]'",
        name=missing.name,
    ) from None

INTERPRETED = triton.knobs.runtime.interpret  # triton.jit reads it once, in the modules here
