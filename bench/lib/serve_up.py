"""``serve up`` as a process of a bench."""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mooncake_serving.serve.up import signals_as_ctrl_c


class Up(NamedTuple):
    """A cluster that is ready: its router's URL, and the process that has started all others."""

    url: str
    pid: int


@contextlib.contextmanager
def serve_up(model: Path, *more: str) -> Iterator[Up]:
    """Start a cluster, and end it behind the block, also if this process is told to end.

    Args:
        model: of its engines.
        more: further options of ``serve up``.

    Raises:
        RuntimeError: it has ended before it was ready; with the end of its log.
    """
    signals_as_ctrl_c()
    command = [sys.executable, "-m", "mooncake_serving", "serve", "up", "--port=0"]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, f"--model={model}", *more], stdout=subprocess.PIPE, stderr=errors, text=True
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if "ready at" not in line:
                errors.seek(0)
                raise RuntimeError(f"serve up has ended: {errors.read()[-2000:]}")
            yield Up(line.split()[3].rstrip(":"), process.pid)
        finally:
            process.terminate()  # a Ctrl-C is ignored where a shell has started this by &
            process.communicate()
