"""Read a machine for `Topology`; on failure, say which argument was wrong."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from .._machine_root import MachineRoot
from ..errors import InvalidArgument
from . import nvml, sysfs
from .model import Malformed, System

_Read = TypeVar("_Read")


def discover_system(root: str | os.PathLike[str]) -> System:
    """Read the files under a root, and query NVML if they are this machine's."""
    try:
        files = MachineRoot(root)
    except TypeError:
        raise InvalidArgument(f"discover: root must be a path, got {root!r}") from None
    if not files.path("/sys").is_dir():
        raise InvalidArgument(f"discover: root must have a folder sys, got {str(root)!r}")
    try:
        system = sysfs.read_system(files)
    except Malformed as error:
        raise InvalidArgument(
            f"discover: root must be a machine's files, got {str(root)!r}: {error}"
        ) from None
    return nvml.with_nvml(system) if str(root) == "/" else system


def read_file(op: str, what: str, reader: Callable[[Path], _Read], path: object) -> _Read:
    """Read a file that must be ``what``."""
    try:
        return reader(Path(path))  # type: ignore[arg-type]
    except (Malformed, OSError, TypeError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InvalidArgument(f"{op}: path must be {what}, got {path!s}: {why}") from None
