"""The serving layers on top of mooncake_kernels: they make decisions, without device code."""
