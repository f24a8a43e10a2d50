import pytest

from .support import engine_pair


@pytest.fixture(params=["local", "shm", "tcp"])
def pair(request):
    """Two engines of this process, joined by each transport in turn."""
    with engine_pair(request.param) as engines:
        yield engines


@pytest.fixture
def tcp_pair():
    with engine_pair("tcp") as engines:
        yield engines
