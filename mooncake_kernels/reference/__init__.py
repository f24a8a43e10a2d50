"""The specification of every kernel: the loop, in plain torch or numpy. Slow, and obvious."""
