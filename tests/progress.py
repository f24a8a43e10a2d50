"""Programs that may take as long as they need, but not stand still."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IDLE_S = 120.0  # without a clock tick, a read or an output: it waits for something that never comes
LIMIT_S = 3600.0  # that a program which runs in circles has
POLL_S = 0.1


def run_to_its_end(
    command: Sequence[Any], env: Mapping[str, str] | None = None, idle_s: float = IDLE_S
) -> "subprocess.CompletedProcess[str]":
    """Run a program as long as a process of its session computes, reads or writes.

    On a busy machine a start with many imports takes minutes: a limit of time would fail there.

    Raises:
        AssertionError: it stands still, or does not end; with what it has said.
    """
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        with subprocess.Popen(
            command, stdout=out, stderr=errors, env=env, start_new_session=True
        ) as process:
            try:
                in_time = _wait(process, (out.fileno(), errors.fileno()), idle_s)
            finally:
                with contextlib.suppress(ProcessLookupError):  # children may be left
                    os.killpg(process.pid, signal.SIGKILL)
        told = []
        for file in (out, errors):
            file.seek(0)
            told.append(file.read())
    assert in_time, f"{command} made no progress\n{''.join(told)}"
    return subprocess.CompletedProcess(command, process.returncode, *told)


def _wait(process: "subprocess.Popen[bytes]", outputs: tuple[int, ...], idle_s: float) -> bool:
    """Wait for its end; False: it stands still."""
    seen, since, begin = None, time.monotonic(), time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(POLL_S)
            return True
        now = time.monotonic()
        done = (*(os.fstat(file).st_size for file in outputs), work_of(process.pid))
        if done != seen:
            seen, since = done, now
        if now - since > idle_s or now - begin > LIMIT_S:
            return False


def work_of(session: int) -> tuple[int, int]:
    """Clock ticks that the processes of a session have taken, and bytes that they have read."""
    ticks = num_bytes = 0
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) != session:
                continue
            ticks += sum(map(int, fields[11:15]))  # its own, and those of children that have ended
            read = (folder / "io").read_text().split("rchar: ")[1].split()[0]
            num_bytes += int(read)
    return ticks, num_bytes
