"""Optional packages: who lacks one is told which extra brings it."""

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def needed_from(extra: str, module: str) -> Iterator[None]:
    """Import optional packages in a ``with`` block, directly or by way of one's own modules.

    Args:
        extra: of this project, which brings them.
        module: who needs them, ``__name__``.

    Raises:
        ModuleNotFoundError: one is missing; the message names it, and the extra.
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.startswith("mooncake"):
            raise
        raise ModuleNotFoundError(
            f"{module}: {missing.name} is not installed: pip install 'mooncake-kernels[{extra}]'",
            name=missing.name,
        ) from None
