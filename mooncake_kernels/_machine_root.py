"""A machine's files: /sys and /proc of this one, or a captured copy.

All their readers take a root, so that other machines can be tested.
"""

import os
from pathlib import Path

_MAX_LINKS = 40  # like the kernel: more in one path is a loop


class MachineRoot:
    """The files under one root. Names are absolute, as on the machine itself."""

    def __init__(self, root: str | os.PathLike[str] = "/"):
        self.root = Path(root)

    def path(self, name: str) -> Path:
        """Where the file is here; its links are not followed."""
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str | None:
        """Return a file's contents, stripped; None if it cannot be read.

        Files of sysfs return EINVAL for what a device cannot report (the speed of a link that is
        down): that is also None.
        """
        resolved = self.resolve(name)
        if resolved is None:
            return None
        try:
            return self.path(resolved).read_bytes().decode("utf-8", "replace").strip()
        except OSError:
            return None

    def integer(self, name: str) -> int | None:
        """Return the number in a file (decimal, or with 0x); None if there is none."""
        try:
            return int(self.text(name) or "", 0)
        except ValueError:
            return None

    def names(self, folder: str) -> list[str]:
        """Return a folder's entries, sorted; empty if it does not exist."""
        resolved = self.resolve(folder)
        if resolved is None:
            return []
        try:
            return sorted(os.listdir(self.path(resolved)))
        except OSError:
            return []

    def resolve(self, name: str) -> str | None:
        """Follow all links, within the root; None if they lead nowhere."""
        done: list[str] = []
        todo = [part for part in reversed(name.split("/")) if part]
        num_links = 0
        while todo:
            part = todo.pop()
            if part == ".":
                continue
            if part == "..":
                done = done[:-1]
                continue
            here = self.path("/".join([*done, part]))
            if not os.path.islink(here):  # Path's own raises if access is denied
                done.append(part)
                continue
            num_links += 1
            if num_links > _MAX_LINKS:
                return None
            try:
                target = os.readlink(here)
            except OSError:  # it has just vanished
                return None
            if target.startswith("/"):
                done = []
            todo += [part for part in reversed(target.split("/")) if part]
        resolved = "/" + "/".join(done)
        return resolved if os.path.lexists(self.path(resolved)) else None
