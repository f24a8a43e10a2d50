"""The specification of every kernel: a loop in plain torch or numpy. Slow and obvious."""
