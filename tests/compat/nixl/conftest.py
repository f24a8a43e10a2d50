from dataclasses import dataclass

import pytest

from ..support import SIZE, addressed, untouched
from .support import Far, Near, far_agent, near_agent


@dataclass
class Pair:
    """An agent with hashed memory, and one that it knows, whose memory is untouched."""

    near: Near
    far: Near | Far


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in ("UCX_TLS", "NIXL_TELEMETRY_ENABLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def near():
    with near_agent("near", addressed(SIZE)) as near:
        yield near


@pytest.fixture(params=["local", "shm", "tcp"])
def pair(request, monkeypatch):
    """The other agent in this process, or in another, which is reached by that transport."""
    if request.param == "local":
        with near_agent("near", addressed(SIZE)) as near, near_agent("far", untouched(SIZE)) as far:
            yield Pair(near, far)
        return
    allowed = {"shm": "sm", "tcp": "tcp"}[request.param]
    monkeypatch.setenv("UCX_TLS", allowed)
    with far_agent("far", allowed) as far, near_agent("near", addressed(SIZE)) as near:
        yield Pair(near, far)
