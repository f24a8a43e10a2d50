"""Where the pool of a host is, if no one says where."""

import contextlib
import os
import stat

from mooncake_kernels.errors import InvalidArgument

SHARED_MEMORY = "/dev/shm"


def default_path() -> str:
    """Return the path of a pool in a folder of this user, which is made if it is not there.

    The folder is not below ``$XDG_RUNTIME_DIR``, which belongs to this user as well, but is a tenth
    of the memory, and goes when its user logs out.

    Raises:
        InvalidArgument: what is there may be of others: anyone may make a file of any name in
            shared memory.
        OSError: the folder cannot be made.
    """
    user = os.geteuid()
    folder = f"{SHARED_MEMORY}/mooncake-store-{user}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    about = os.lstat(folder)
    kind, mode = stat.S_IFMT(about.st_mode), stat.S_IMODE(about.st_mode)
    if kind != stat.S_IFDIR or about.st_uid != user or mode & 0o077:
        found = "a folder" if kind == stat.S_IFDIR else "no folder"
        raise InvalidArgument(
            f"master_server_addr must be a path, unless {folder} is a folder that only user {user} "
            f"can use (mode 0700), and it is {found} of user {about.st_uid} with mode {mode:04o}, "
            "got ''"
        )
    return f"{folder}/pool"
