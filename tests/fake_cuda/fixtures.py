"""Fixtures of tests in such a process: GPUs, and the driver if it is the fake one."""

import pytest

from ..transfer.support import eventually
from .gpus import GPUS, IS_FAKE, WORLD

assert WORLD in ("fake_gpu", "gpu"), "these tests need a process of their own"


@pytest.fixture
def gpus():
    """Two GPUs; at the end nothing of theirs may be left that was not there before.

    What threads of the test before are still giving back may be there, and then is not.
    """
    if not IS_FAKE:
        yield GPUS
        return
    GPUS.driver.library.fake_clear()
    GPUS.driver.set(
        num_looks=2, has_no_batch=0, hangs=0, first_gpu=0, takes_legacy=0, num_batches=0
    )
    GPUS.driver.set(is_capturing=0, others_capture=0)
    before = GPUS.driver.owned()
    yield GPUS
    left = GPUS.driver.owned
    eventually(lambda: all(left()[name] <= before[name] for name in before), left())
    assert GPUS.driver.get("num_forbidden") == 0


@pytest.fixture
def driver(gpus):
    """The fake driver, which can be told to fail."""
    if not IS_FAKE:
        pytest.skip("the driver is a real one")
    return gpus.driver
