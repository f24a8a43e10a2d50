"""``BufferHandle``: an object that is read in place."""

import numpy as np


class BufferHandle(np.ndarray):
    """The bytes of an object, not a copy; read-only. They stay for as long as the handle lives.

    An array, so that it supports the buffer protocol (``memoryview(handle)``, ``np.frombuffer``),
    which a Python class can do by itself only from 3.12 on.
    """

    def ptr(self) -> int:
        """Address of the bytes."""
        return self.ctypes.data

    def size(self) -> int:  # type: ignore[override]
        """Number of bytes. A method, as in Mooncake; arrays have it as an attribute."""
        return self.nbytes

    def __bool__(self) -> bool:
        return True  # it exists

    def __repr__(self) -> str:
        return f"<BufferHandle of {self.nbytes} bytes>"


def handle_of(view: memoryview) -> BufferHandle:
    """Make the handle of a value, which it keeps alive."""
    return np.frombuffer(view, np.uint8).view(BufferHandle)
