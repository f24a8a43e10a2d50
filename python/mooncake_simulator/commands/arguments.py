"""Arguments shared by several commands."""

import argparse
import os
from pathlib import Path


def seed(text: str) -> int:
    """Parse a seed."""
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be an integer of at least 0, got {text!r}")
    return int(text)


def folder(path: str | None) -> Path | None:
    """Make the folder of results, if one is requested: errors are reported before the run.

    Raises:
        OSError: it cannot be made, or is not writable.
        ModuleNotFoundError: the package that draws plots is missing.
    """
    if path is None:
        return None
    from .. import plot  # noqa: F401  needs matplotlib

    results = Path(path)
    results.mkdir(parents=True, exist_ok=True)
    if not os.access(results, os.W_OK | os.X_OK):
        raise PermissionError(f"--out must be a folder to write to, got {path!r}")
    return results
