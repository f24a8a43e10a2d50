import dataclasses

import pytest

from ..metadata.support import RedisServer
from .store_support import Memory, pool_file, set_up
from .support import SIZE, Process, Side, addressed, other_process, side, untouched


@dataclasses.dataclass
class Pair:
    """An engine with hashed memory, and one that it reaches by name, whose memory is untouched."""

    near: Side
    far: Side | Process
    name: str


@pytest.fixture(params=["local", "tcp", "process"])
def pair(request, monkeypatch):
    """The peer in this process (by its own name, so a copy; by another, so tcp), or in another."""
    monkeypatch.delenv("MC_FORCE_TCP", raising=False)
    monkeypatch.delenv("MC_TRANSFER_TIMEOUT", raising=False)
    with side(addressed(SIZE)) as near:
        if request.param == "process":
            with other_process() as far:
                yield Pair(near, far, far.name)
        else:
            host = {"local": "127.0.0.1", "tcp": "localhost"}[request.param]
            with side(untouched(SIZE)) as far:
                yield Pair(near, far, f"{host}:{far.port}")


@pytest.fixture
def server(tmp_path):
    """Where a cluster has its directory."""
    pytest.importorskip("redis")
    pytest.importorskip("msgspec")
    server = RedisServer(tmp_path)
    yield server
    server.stop()


@pytest.fixture
def path():
    with pool_file() as path:
        yield path


@pytest.fixture
def store(path):
    store = set_up(path)
    yield store
    store.close()


@pytest.fixture
def memory(store):
    return Memory(store)
