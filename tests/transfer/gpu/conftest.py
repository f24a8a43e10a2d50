"""A process of its own, whose CUDA driver is made up, or is that of a real GPU."""

import pytest

from mooncake_kernels.errors import Unavailable
from mooncake_kernels.transfer import TransferEngine

from ...conftest import skip
from .gpus import GPUS, IS_FAKE, WORLD

assert WORLD in ("fake_gpu", "gpu"), "these tests need a process of their own"


@pytest.fixture(scope="session", autouse=True)
def _has_gpu():
    with TransferEngine() as engine:
        try:
            engine.register(GPUS.allocate(16).buffer)
        except Unavailable as error:
            skip("cuda", str(error))


@pytest.fixture
def gpus():
    """Two GPUs; at the end the engines, which are closed, have nothing of theirs."""
    if not IS_FAKE:
        yield GPUS
        return
    GPUS.driver.library.fake_clear()
    GPUS.driver.set(num_looks=2, has_no_batch=0, hangs=0, first_gpu=0)
    before = GPUS.driver.owned()
    yield GPUS
    assert GPUS.driver.owned() == before


@pytest.fixture
def driver(gpus):
    """The made-up driver, which can be told to fail."""
    if not IS_FAKE:
        pytest.skip("the driver is a real one")
    return gpus.driver
