"""A process of its own, whose CUDA driver is made up, or is that of a real GPU."""

import pytest

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.transfer import TransferEngine

from ...conftest import skip
from ...fake_cuda.fixtures import driver, gpus  # noqa: F401
from ...fake_cuda.gpus import GPUS, IS_FAKE
from ...fake_cufile.library import FakeCuFile


@pytest.fixture(scope="session", autouse=True)
def library():
    """The made-up libcufile, before the first that looks for one; None beside a real driver."""
    return FakeCuFile() if IS_FAKE else None


@pytest.fixture(scope="session", autouse=True)
def _has_gpu():
    with TransferEngine() as engine:
        try:
            engine.register(GPUS.allocate(16).buffer)
        except Unavailable as error:
            skip("cuda", str(error))
