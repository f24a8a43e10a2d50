"""The two binaries as they are linked."""

import subprocess
from importlib.util import find_spec

import pytest

from mooncake_kernels import _library

MAX_STATIC_TLS_BYTES = 256  # a program has about 1.5 KB for all libraries that it opens later


def readelf(option: str, binary: str) -> list[str]:
    command = ["readelf", "-W", option, binary]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


BINARIES = [str(_library.LIBRARY), find_spec("mooncake_kernels._host").origin]


@pytest.mark.parametrize("binary", BINARIES)
def test_static_thread_local_storage_is_small(binary):
    """What does not fit cannot be opened: "cannot allocate memory in static TLS block"."""
    if any("STATIC_TLS" in line for line in readelf("--dynamic", binary)):
        [segment] = [line.split() for line in readelf("--segments", binary) if " TLS " in line]
        assert int(segment[5], 16) <= MAX_STATIC_TLS_BYTES
