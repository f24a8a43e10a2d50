"""The base of objects that are closed at the end of a ``with`` block."""

from typing import TypeVar

Self = TypeVar("Self")


class Closing:
    """A context manager around ``close()``."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
