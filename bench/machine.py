"""The origin of the numbers: the machine, the versions and the commit."""

import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch


def describe(device: str, threads: int) -> dict[str, Any]:
    """Return what a reader must know to compare one run with another."""
    git = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        capture_output=True, text=True, cwd=Path(__file__).parent,
    )  # fmt: skip
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": git.stdout.strip() or "none",
        "command": command(),
    }


def command() -> str:
    """Return what this bench was called with, but for the file of its results."""
    words = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return re.sub(r" --json[= ]\S+", "", words)


def cpu_name() -> str:
    """Return the processor's name, as Linux reports it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
