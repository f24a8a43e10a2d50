"""Processes that are stopped, and do not notice."""

import os
import signal
import time
from pathlib import Path

WAIT_S = 30


def stop(pid: int) -> None:
    """Stop a process, and wait until each of its threads has stopped: they run on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    until = time.monotonic() + WAIT_S
    while any(state != "T" for state in map(_state, Path(f"/proc/{pid}/task").glob("*/stat"))):
        assert time.monotonic() < until, f"process {pid} has not stopped"
        time.sleep(0.001)


def _state(stat: Path) -> str:
    try:
        return stat.read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):  # a thread that has just ended
        return "T"
