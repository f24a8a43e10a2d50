"""The origin of the numbers: the machine, the versions and the commit."""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
KEPT = ROOT / "bench" / "results"  # what the docs quote


def describe(device: str, threads: int) -> dict[str, Any]:
    """Return what a reader must know to compare one run with another."""
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else cpu_name(),
        "cores": os.cpu_count(),
        "threads": threads,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "command": command(),
    }


def commit() -> str:
    """Return the commit, marked if it is not all: results of an earlier bench do not count."""
    name = git("describe", "--always")
    changed = git(
        "status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results"
    )
    return f"{name}-dirty" if changed else name or "none"


def git(*words: str) -> str:
    """Return what git says; nothing where there is none, as in many a container with a GPU."""
    if shutil.which("git") is None:
        return ""
    return subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT).stdout.strip()


def why_not_kept(file: Path) -> str | None:
    """Return why results cannot be written there, or may not: none could tell what they are of."""
    if file.is_dir() or not file.parent.is_dir():
        return f"must be a file in a folder that exists, got {file}"
    if KEPT in file.resolve().parents and commit().endswith("-dirty"):
        return f"results are kept in {KEPT} only if the tree has no uncommitted changes, got {file}"
    return None


def command() -> str:
    """Return what this bench was called with, but for the file of its results."""
    words = shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]])
    return re.sub(r" --json[= ]\S+", "", words)


def cpu_name() -> str:
    """Return the processor's name, and what tells it from others that a hypervisor calls the same.

    A virtual Zen 3 and a Zen 5 may both be an "AMD EPYC".
    """
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    if "model name" not in told:
        return platform.machine()
    kind = [f"{key} {told[key]}" for key in ("cpu family", "model") if key in told]
    flags = told.get("flags", "").split()
    kind += ["AVX-512"] if "avx512f" in flags else ["AVX2"] if "avx2" in flags else []
    return f"{told['model name']} ({', '.join(kind)})"
