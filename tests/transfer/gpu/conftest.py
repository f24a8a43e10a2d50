"""A separate process, whose CUDA driver is fake, or is that of a real GPU."""

import pytest

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.transfer import TransferEngine

from ...conftest import skip
from ...fake_cuda.fixtures import driver, gpus  # noqa: F401
from ...fake_cuda.gpus import GPUS, IS_FAKE
from ...fake_cufile.library import FakeCuFile


@pytest.fixture(scope="session", autouse=True)
def library():
    """The fake libcufile, before anything looks for one; None with a real driver."""
    return FakeCuFile() if IS_FAKE else None


@pytest.fixture(scope="session", autouse=True)
def _has_gpu():
    with TransferEngine() as engine:
        try:
            engine.register(GPUS.allocate(16).buffer)
        except Unavailable as error:
            skip("cuda", str(error))


@pytest.fixture
def pair(gpus, pair):  # noqa: F811
    return pair
