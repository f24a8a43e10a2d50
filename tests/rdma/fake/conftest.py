"""A separate process whose libibverbs.so.1 and libcuda.so.1 are fake."""

import ctypes
import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from mooncake_kernels import Unavailable, _host, rdma

from ...conftest import skip
from .gpu import Driver
from .pairs import Connection
from .world import World

assert os.environ.get("MK_TEST_WORLD") == "fake", "these tests need a process of their own"

DRIVER = Driver()
WORLD = World()

# The world needs no reset between examples: each must leave nothing behind.
CHECKS = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
PHASES = set(Phase) - {Phase.explain}
settings.register_profile(
    "fake", deadline=None, database=None, suppress_health_check=CHECKS, phases=PHASES
)
settings.load_profile("fake")


def _assert_fake() -> None:
    mapped = set(re.findall(r"\S*/libibverbs\.so\S*", Path("/proc/self/maps").read_text()))
    assert mapped == {str(WORLD.path)}, mapped
    assert _host.missing_verbs() == ""
    assert [device.name for device in rdma.devices()] == ["fake0", "fake1", "fake2", "fake3"]


_assert_fake()


@pytest.fixture(autouse=True)
def world():
    """Four NICs; at the end nothing of theirs may be left."""
    WORLD.reset()
    DRIVER.reset()
    yield WORLD
    WORLD.check()


@pytest.fixture
def device(world):
    with rdma.open("fake0") as opened:
        yield opened


@pytest.fixture
def connection(world):
    """fake0 and fake1, connected, with 64 KiB of memory on either side."""
    with Connection(world) as made:
        yield made


@pytest.fixture
def domain(world):
    """(context, domain) of fake0, as pyverbs would hold them."""
    verbs = world.library
    for name in ("ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd"):
        getattr(verbs, name).restype = ctypes.c_void_p
    count = ctypes.c_int()
    devices = ctypes.c_void_p(verbs.ibv_get_device_list(ctypes.byref(count)))
    first = ctypes.cast(devices, ctypes.POINTER(ctypes.c_void_p))[0]
    context = ctypes.c_void_p(verbs.ibv_open_device(ctypes.c_void_p(first)))
    verbs.ibv_free_device_list(devices)
    pd = ctypes.c_void_p(verbs.ibv_alloc_pd(context))
    yield context.value, pd.value
    assert world.live() == {"context": 1, "protection domain": 1}
    assert verbs.ibv_dealloc_pd(pd) == verbs.ibv_close_device(context) == 0


@pytest.fixture
def gpu(world):
    """A driver with a context on GPU 0; at the end nothing of its context may be held."""
    if DRIVER.library is None:
        skip("cuda", "there is no cudaTypedefs.h to make up a driver with")
    DRIVER.reset(active_device=0)
    try:
        rdma.flush_writes(0)
    except Unavailable as error:
        skip("cuda", str(error))
    DRIVER.reset(active_device=0)
    yield DRIVER
    assert DRIVER.get("num_retained") == 0 and not DRIVER.get("has_context")
    DRIVER.reset()
