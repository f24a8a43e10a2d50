"""A separate process, whose CUDA driver is fake, or is that of a real GPU."""

import pytest

from mooncake_kernels.pool import ObjectPool

from ...fake_cuda.fixtures import driver, gpus  # noqa: F401
from ...fake_cuda.gpus import IS_FAKE

UNIT = 4096


@pytest.fixture(autouse=True)
def _default_stream(gpus):  # noqa: F811
    """Copies that name no other stream run in the default one."""
    if IS_FAKE:
        gpus.driver.set(takes_legacy=1)


@pytest.fixture(params=["pageable", "page-locked"])
def pool(request, gpus):  # noqa: F811
    """A pool of 64 units of 4 KiB."""
    with ObjectPool.create(64 * UNIT) as made:
        if request.param == "page-locked":
            made.page_lock(0)
        yield made
