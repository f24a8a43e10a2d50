"""``BufferHandle``: an object that is read where it is."""

import numpy as np


class BufferHandle(np.ndarray):
    """The bytes of an object, not a copy; read-only. They stay for as long as this lasts.

    An array, so that it has a buffer (``memoryview(handle)``, ``np.frombuffer``), which a class
    of Python can have by itself only from 3.12 on.
    """

    def ptr(self) -> int:
        """Where the bytes are."""
        return self.ctypes.data

    def size(self) -> int:  # type: ignore[override]
        """How many bytes there are. A method, as in Mooncake; arrays have it as an attribute."""
        return self.nbytes

    def __bool__(self) -> bool:
        return True  # it is there

    def __repr__(self) -> str:
        return f"<BufferHandle of {self.nbytes} bytes>"


def handle_of(view: memoryview) -> BufferHandle:
    """The handle of a value, which it keeps there."""
    return np.frombuffer(view, np.uint8).view(BufferHandle)
