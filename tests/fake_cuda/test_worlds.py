"""The made-up drivers are the ones of their processes, whatever driver the machine has."""

import os
import subprocess
import sys

import pytest

from ..conftest import skip
from ..cxx import without_sanitizer
from ..rdma.fake import build as rdma
from . import driver
from .worlds import pass_with_a_made_up_driver

RUNTIME = rdma.CUDA_INCLUDE.parent / "lib64/libcudart.so"
COUNT_DEVICES = """
import ctypes, sys
sys.exit(ctypes.CDLL(sys.argv[1]).cudaGetDeviceCount(ctypes.byref(ctypes.c_int())))
"""


def test_fake_driver_precedes_the_real_one(tmp_path, monkeypatch):
    command = ["gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-xc", os.devnull]
    library = tmp_path / "libcuda.so.1"
    subprocess.run([*command, "-o", library], check=True, env=without_sanitizer())
    # Loaded at the start of every process: as early as by ``import torch``, at least.
    (tmp_path / "sitecustomize.py").write_text("import ctypes\nctypes.CDLL('libcuda.so.1')\n")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k host_memory_at_one_end")
    pass_with_a_made_up_driver("tests/transfer/gpu/test_gpu_ipc.py")


@pytest.mark.parametrize("fake", [driver, rdma], ids=["fake_cuda", "rdma"])
def test_cuda_runtime_finds_no_device(fake):
    """So torch, which calls it, does not use the GPUs that are made up."""
    library = fake.build_driver()
    if library is None or not RUNTIME.exists():
        skip("cuda", "there is no CUDA toolkit")
    done = subprocess.run(
        [sys.executable, "-c", COUNT_DEVICES, RUNTIME], env=rdma.preloading(library), timeout=60
    )
    assert done.returncode > 0  # the runtime's error; below 0 it was killed
