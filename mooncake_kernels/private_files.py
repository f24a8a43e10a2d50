"""Files with secrets: folders that only their owner enters, files that only their owner reads."""

import os
import stat
from pathlib import Path

from .errors import InvalidArgument


def private_folder(op: str, folder: Path) -> None:
    """Make a folder of mode 0700, or check that one is its owner's alone.

    Args:
        op: the call, which errors name.
        folder: its path.

    Raises:
        InvalidArgument: it is another user's, or others may enter it.
        OSError: it cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidArgument(
            f"{op}: {folder} must be a folder of this user of mode 0700, got mode "
            f"{stat.S_IMODE(found.st_mode):04o} of uid {found.st_uid}"
        )


def write_private(path: Path, text: str) -> None:
    """Write a file of mode 0600, which is there whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    new.replace(path)


def first_line(path: str | Path) -> str:
    """Read the first line of a file, without spaces around it; errors do not quote it.

    Raises:
        ValueError: it is not printable ASCII, or there is none.
        OSError: the file cannot be read.
    """
    try:
        with open(path, encoding="ascii") as file:
            line = file.readline(1 << 16).strip()
    except UnicodeDecodeError:
        line = "\0"
    if not line or not line.isprintable():
        got = "something else" if line else "nothing"
        raise ValueError(f"the first line of {path} must be printable ASCII, got {got}")
    return line
