"""Optional packages: who lacks one is told which extra brings it."""

import contextlib
from collections.abc import Iterator


class MissingExtra(ModuleNotFoundError):
    """A package is not installed.

    Attributes:
        extra: of this project, which brings it.
    """

    def __init__(self, message: str, *, name: str, extra: str):
        super().__init__(message, name=name)
        self.extra = extra


@contextlib.contextmanager
def needed_from(extra: str, module: str) -> Iterator[None]:
    """Import optional packages in a ``with`` block, directly or by way of one's own modules.

    Args:
        extra: of this project, which brings them.
        module: who needs them, ``__name__``.

    Raises:
        MissingExtra: one is missing; the message names it, and the extra.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("mooncake"):
            raise
        raise MissingExtra(
            f"{module}: {missing.name} is not installed: pip install 'mooncake-kernels[{extra}]'",
            name=missing.name,
            extra=extra,
        ) from None
