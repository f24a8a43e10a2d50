"""``BufferHandle``: an object that is read in place."""

from typing import Any

import numpy as np


class _Size(int):
    """What Mooncake has as a method and arrays as an attribute: ``size() == size``."""

    def __call__(self) -> int:
        return int(self)


class BufferHandle(np.ndarray):
    """The bytes of an object, not a copy; read-only. They stay for as long as the handle lives.

    An array, so that it supports the buffer protocol (``memoryview(handle)``, ``np.frombuffer``),
    which a Python class can do by itself only from 3.12 on. It is shown and compared as Mooncake's
    is, which is none; its parts, and what is calculated from it, are plain arrays.
    """

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def ptr(self) -> int:
        """Address of the bytes."""
        return self.ctypes.data

    @property
    def size(self) -> _Size:
        """Number of bytes, and a method that returns it, as Mooncake's."""
        return _Size(self.nbytes)

    def __bool__(self) -> bool:
        return True  # it exists

    def __repr__(self) -> str:
        return f"<BufferHandle of {self.nbytes} bytes>"

    def __str__(self) -> str:
        return repr(self)

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return array[()] if return_scalar else array


def handle_of(view: memoryview) -> BufferHandle:
    """Make the handle of a value, which it keeps alive."""
    return np.frombuffer(view, np.uint8).view(BufferHandle)
