"""A wall clock of other processes, which a test sets: their environment, and its shift."""

import mmap
import os
import struct
import subprocess
from pathlib import Path

from ..cxx import without_sanitizer

SOURCE = Path(__file__).parent / "shifted_clock.c"
HOUR_S, DAY_S = 3600, 86400
JUMPS_S = (HOUR_S, -HOUR_S, DAY_S, -DAY_S)


class ShiftedClock:
    """The wall clock of processes that are started with ``environ``; it is right at first."""

    def __init__(self, folder: Path):
        library, path = folder / "shifted_clock.so", folder / "shift"
        command = ["gcc", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", SOURCE, "-o", library]
        subprocess.run(command, check=True, env=without_sanitizer())
        path.write_bytes(bytes(8))
        with path.open("r+b") as file:
            self._shift = mmap.mmap(file.fileno(), 8)
        preloaded = [os.environ.get("LD_PRELOAD", ""), str(library)]
        self.environ = {
            **os.environ,
            "LD_PRELOAD": " ".join(filter(None, preloaded)),
            "MK_TEST_CLOCK": str(path),
        }

    def set(self, seconds: int) -> None:
        """Let the clock jump: it is this much ahead from now on."""
        self._shift[:] = struct.pack("<q", seconds)
