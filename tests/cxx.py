"""Tests that are C++ programs, built with the sanitizers from sources of csrc."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TESTS = Path(__file__).parent
CSRC = TESTS.parent / "csrc"
VERBS_INCLUDE = TESTS.parent / "third_party/rdma-core"  # of infiniband/verbs.h


def build(test: Path, sources: Sequence[str], folder: Path, *more_flags: str) -> Path:
    """Compile a test with the named files of csrc, each alone for ccache; return the program."""
    program = folder / test.stem
    flags = ["-O1", "-g", "-std=c++17", "-Wall", "-Wno-unknown-pragmas", "-Wno-attributes"]
    flags += ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]
    flags += [f"-I{CSRC}", f"-I{TESTS}", f"-isystem{VERBS_INCLUDE}"]
    cache = ["ccache"] if shutil.which("ccache") else []
    to_compile = [flag for flag in more_flags if re.match("-(?!l|Wl)", flag)]

    def compiled(file: Path) -> Path:
        made = folder / f"{program.stem}-{str(file.relative_to(TESTS.parent)).replace('/', '-')}.o"
        command = [*cache, "g++", *flags, *to_compile, "-c", file, "-o", made]
        subprocess.run(command, check=True, env=without_sanitizer())
        return made

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(compiled, [test, *(CSRC / source for source in sources)]))
    command = ["g++", *flags, *objects, "-o", program, *more_flags]
    subprocess.run(command, check=True, env=without_sanitizer())
    return program


def without_sanitizer() -> dict[str, str]:
    """The environment for a compiler, in case the tests run under a sanitizer."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


def run(program: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess:
    # Address sanitizer's own fake stacks and the emulator's fibers do not know of each other.
    env = {"ASAN_OPTIONS": "detect_stack_use_after_return=0", **variables}
    return subprocess.run([program, *arguments], capture_output=True, text=True, env=env)
