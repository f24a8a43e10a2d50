"""The `backend` fixture for attention operators that have no CUDA kernel of their own."""

import pytest

from ..conftest import Backend, skip


@pytest.fixture
def engine(backend: Backend) -> Backend:
    """Reference, host and Triton: on a GPU, Triton's kernel takes the place of "cuda"."""
    if backend.engine == "cuda":
        skip("attention in CUDA", "the attention kernel of GPUs is Triton's")
    return backend


@pytest.fixture
def host_engine(engine: Backend) -> Backend:
    """Without Triton's interpreter, which neither rounds nor saturates to fp8 as a GPU does."""
    if engine.engine == "triton" and engine.device == "cpu":
        skip("fp8 in Triton's interpreter", "it does not round as a GPU does")
    return engine
