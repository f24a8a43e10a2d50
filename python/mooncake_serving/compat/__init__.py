"""The Python APIs of other projects, on ``mooncake_kernels``: only the import changes."""
