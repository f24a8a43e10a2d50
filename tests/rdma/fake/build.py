"""Compiles the fake libraries, as the shared objects that dlopen() looks for by name."""

import os
import stat
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from ...cxx import VERBS_INCLUDE

HERE = Path(__file__).parent
TESTS = HERE.parents[1]
DRIVER = [TESTS / "kv/fake_cuda_driver.cc", HERE / "gpu.cc"]
VERBS = sorted(set(HERE.glob("*.cc")) - set(DRIVER))
CUDA_INCLUDE = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"), "include")
# The runtime of a sanitizer that Python was started under: see tests/sanitize.
_SANITIZERS = {"libasan": "address,undefined", "libtsan": "thread"}


def build_verbs(*flags: str) -> Path:
    """Compile libibverbs.so.1; `-DFAKE_OLD` is one that lacks what newer versions have."""
    return build_library("libibverbs.so.1", VERBS, *flags)


def build_driver() -> Path | None:
    """Compile libcuda.so.1; None without CUDA's headers."""
    if not (CUDA_INCLUDE / "cudaTypedefs.h").is_file():
        return None
    return build_library("libcuda.so.1", DRIVER, f"-isystem{CUDA_INCLUDE}")


def preloading(library: Path) -> dict[str, str]:
    """The environment of a process in which a library comes before the machine's own.

    Whichever is loaded first is the one of that name, and ``import torch`` may load the machine's.
    """
    before = os.environ.get("LD_PRELOAD", "").split()
    return {**os.environ, "LD_PRELOAD": " ".join([*before, str(library)])}


def _own_folder() -> Path:
    """Where libraries stay for the next run: not what others made there first, to have it run."""
    folder = Path(tempfile.gettempdir()) / f"mooncake-kernels-fake-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    about = folder.lstat()
    assert stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid(), folder
    assert stat.S_IMODE(about.st_mode) & 0o022 == 0, f"{folder} may be written by others"
    return folder


def build_library(name: str, sources: list[Path], *flags: str) -> Path:
    """Compile a library, unless it is there already."""
    preloaded = os.environ.get("LD_PRELOAD", "")
    sanitize = [f"-fsanitize={kind}" for name, kind in _SANITIZERS.items() if name in preloaded]
    command = ["g++", "-std=c++17", "-O1", "-g", "-Wall", "-shared", "-fPIC", *sanitize]
    command += [
        f"-I{TESTS}",
        f"-isystem{VERBS_INCLUDE}",
        f"-Wl,-soname,{name}",
        *flags,
        *map(str, sources),
        "-ldl",
    ]
    headers = {header for file in sources for header in file.parent.glob("*.h")}
    texts = [file.read_bytes() for file in (*sources, *sorted(headers))]
    key = sha256(b"".join([*texts, " ".join(command).encode()])).hexdigest()[:16]
    folder = _own_folder() / key
    folder.mkdir(exist_ok=True)
    if not (folder / name).is_file():
        unfinished = folder / f"{name}.{os.getpid()}"
        env = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"}
        subprocess.run([*command, "-o", str(unfinished)], check=True, env=env)
        unfinished.rename(folder / name)
    return folder / name
