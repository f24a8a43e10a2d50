"""The serving layers on top of mooncake_kernels: what decides. It has no device code of its own."""
