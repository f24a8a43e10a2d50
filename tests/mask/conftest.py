"""The engines of masks: those of `backend` except Triton, which has none."""

import pytest

from ..conftest import Backend, skip


@pytest.fixture
def engine(backend: Backend) -> Backend:
    """Reference, host code and CUDA."""
    if backend.engine == "triton":
        skip("masks in triton", "there is no Triton kernel of masks")
    return backend
