"""A wall clock that jumps."""
