"""The functions of this project that a call enters: as many as a reader of the code follows."""

import sys
from collections.abc import Callable
from pathlib import Path

import mooncake_kernels
import mooncake_serving

ROOTS = tuple(
    str(Path(package.__file__).parent) for package in (mooncake_kernels, mooncake_serving)
)
OF_DIRECTORIES = ("/mooncake_kernels/metadata/", "/mooncake_serving/store/directory/")


def walk(call: Callable[[], object], without: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """(file, function) of what a call enters in this thread, in order.

    Args:
        call: it; what is made once, it has made before.
        without: parts of paths: functions of such files do not count, nor those that they call.
    """
    steps = []

    def note(frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOTS):
            return
        files = code.co_filename, frame.f_back.f_code.co_filename
        if not any(part in file for part in without for file in files):
            name = getattr(code, "co_qualname", code.co_name)  # from Python 3.11 on
            steps.append((code.co_filename, name))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return steps
