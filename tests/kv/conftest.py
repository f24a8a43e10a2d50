"""A GPU, and the engines of copy_batch, which differ from those of `backend`."""

import pytest

from mooncake_kernels import _library

from ..conftest import HAS_CUDA, skip
from .batches import GPU_ENGINES


@pytest.fixture
def gpu() -> str:
    """A CUDA device that the kernels were built for."""
    if not HAS_CUDA:
        skip("cuda", "torch finds no CUDA device")
    if not _library.has_cuda:
        skip("cuda", "_ops.so was built without nvcc")
    return "cuda:0"


@pytest.fixture
def not_triton(request: pytest.FixtureRequest) -> None:
    """Skip the Triton part of `backend`, where it has one: its engine moves bytes only."""
    if "backend" in request.fixturenames and request.getfixturevalue("backend").engine == "triton":
        skip("transforms in triton", "the Triton engine moves bytes only")


@pytest.fixture(params=["reference", "host", *GPU_ENGINES])
def engine(request: pytest.FixtureRequest) -> str:
    """Triton has no copy_batch: it would need the list in the GPU's memory."""
    if request.param in GPU_ENGINES:
        if not HAS_CUDA:
            skip("cuda", "torch finds no CUDA device")
        if not _library.has_cuda:
            skip("cuda", "_ops.so was built without nvcc")
    return request.param
