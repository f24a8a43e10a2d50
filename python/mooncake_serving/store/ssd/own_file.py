"""A tier's file, of this user alone: whoever can write it decides what is read from it."""

import contextlib
import os
import stat

from mooncake_kernels.errors import InvalidArgument


def open_own(path: str) -> tuple[int, bool]:
    """Open a file for reading and writing, or make it; of what is there, nothing is followed.

    Returns:
        The descriptor, which the caller closes; whether the file was made.

    Raises:
        InvalidArgument: it is not a regular file, or belongs to others, or others may write it.
        OSError: it cannot be opened, or made.
    """
    while True:
        with contextlib.suppress(FileNotFoundError):
            return _open_there(path), False
        with contextlib.suppress(FileExistsError):  # another process has made it meanwhile
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), True


def _open_there(path: str) -> int:
    # First as a place: a FIFO or a device is not opened.
    place = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(place)
        mode = stat.S_IMODE(about.st_mode)
        if not stat.S_ISREG(about.st_mode):
            raise InvalidArgument(f"SsdTier: path must be a regular file, got {path!r}")
        if about.st_uid != os.geteuid() or mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise InvalidArgument(
                f"SsdTier: path must be a file of user {os.geteuid()} that no one else can write, "
                f"got {path!r} of user {about.st_uid} with mode {mode:04o}"
            )
        return os.open(f"/proc/self/fd/{place}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(place)
