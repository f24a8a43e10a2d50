"""Shared by all tests: the `backend` fixture, skips that can be made failures, options."""

import importlib.util
import os
import signal
import zlib
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, settings

from mooncake_kernels import config

# What was measured on this machine shall not decide what is tested.
os.environ.setdefault("MOONCAKE_KERNELS_CALIBRATION", "")
HAS_CUDA = torch.cuda.is_available()
if not HAS_CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # must be set before triton is imported

torch.set_num_threads(2)
# No test asserts a time, those of hypothesis neither: of an example, and of drawing some.
settings.register_profile("timeless", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("timeless")
# In the background of a script SIGINT is ignored, by us and by every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="the long form of tests that repeat")
    parser.addoption(
        "--share", metavar="K/N", help="only the K-th, from 0, of N shares of the tests"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if share := config.getoption("--share"):
        which, count = map(int, share.split("/"))
        mine = [zlib.crc32(item.nodeid.encode()) % count == which for item in items]
        config.hook.pytest_deselected(
            items=[item for item, is_mine in zip(items, mine, strict=True) if not is_mine]
        )
        items[:] = [item for item, is_mine in zip(items, mine, strict=True) if is_mine]


@pytest.fixture
def soak(request: pytest.FixtureRequest) -> bool:
    """Whether to run the long form, see CONTRIBUTING.md."""
    return request.config.getoption("--soak")


def skip(need: str, reason: str) -> None:
    """Skip with the reason; fail if MOONCAKE_KERNELS_REQUIRE names the need."""
    if need in config.current().require:
        pytest.fail(f"{need} is required, but {reason}")
    pytest.skip(reason)


@dataclass(frozen=True)
class Backend:
    """One way to run an operator: the engine's name, and where its tensors live."""

    engine: str
    device: str


@pytest.fixture(params=["reference", "host", "triton", "cuda"])
def backend(request: pytest.FixtureRequest) -> Backend:
    """Every engine in turn: the reference, host code, Triton (interpreted without a GPU), CUDA."""
    engine = request.param
    if engine == "triton" and importlib.util.find_spec("triton") is None:
        skip("triton", "triton is not installed")
    if engine == "cuda":
        if not HAS_CUDA:
            skip("cuda", "torch finds no CUDA device")
        if not torch.ops.mooncake_kernels.has_cuda():
            skip("cuda", "_ops.so was built without nvcc")
    on_gpu = engine == "cuda" or (engine == "triton" and HAS_CUDA)
    return Backend(engine, "cuda" if on_gpu else "cpu")
