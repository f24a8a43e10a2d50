import itertools

import pytest

from mooncake_kernels.metadata import bounded_socket

from ...metadata.support import RedisServer
from .support import EmbeddedWorld, RedisWorld

CLUSTERS = map("test-{}".format, itertools.count())


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    """A permanent server; every test has its own cluster."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture(params=["embedded", "redis"])
def make_world(request):
    """Makes empty directories of each kind in turn."""
    worlds = []

    def make():
        if request.param == "embedded":
            worlds.append(EmbeddedWorld())
        else:
            server = request.getfixturevalue("server")
            worlds.append(RedisWorld(f"unix://{server.folder}/redis.sock", next(CLUSTERS)))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()


@pytest.fixture
def world(make_world):
    return make_world()


@pytest.fixture
def directory(world):
    return world.directory


@pytest.fixture
def start(tmp_path):
    """Starts servers that a test may stop, each in its own folder."""
    servers = []

    def start_one(*options):
        folder = tmp_path / f"redis {len(servers)}"
        folder.mkdir()
        servers.append(RedisServer(folder, "--repl-diskless-sync-delay", "0", *options))
        return servers[-1]

    yield start_one
    for server in servers:
        server.stop()


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Wait for a machine that is busy with other things."""
    monkeypatch.setattr(bounded_socket, "TIMEOUT_S", 60)


@pytest.fixture
def impatient(monkeypatch, patient):
    """A server that does not answer is soon abandoned."""
    monkeypatch.setattr(bounded_socket, "TIMEOUT_S", 0.4)
