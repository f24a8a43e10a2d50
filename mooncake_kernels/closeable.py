"""The base of objects that are closed at the end of a ``with`` block."""

from typing import TypeVar

from .errors import InvalidArgument

Self = TypeVar("Self")


class Closeable:
    """A context manager around ``close()``. One whose ``closed`` is True cannot be entered."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        if getattr(self, "closed", False):
            raise InvalidArgument(
                f"{type(self).__name__}: what is entered must be open, got a closed one"
            )
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
