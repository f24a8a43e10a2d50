import itertools

import pytest

from mooncake_kernels.metadata import bounded_socket

from ...metadata.support import PROGRAMS, RedisServer
from .support import EmbeddedWorld, RedisWorld

CLUSTERS = map("test-{}".format, itertools.count())


@pytest.fixture(scope="session")
def permanent(tmp_path_factory):
    """A server of each kind, started on first use; every test has its own cluster."""
    servers = {}

    def start(kind):
        if kind not in servers:
            folder = tmp_path_factory.mktemp(kind)
            servers[kind] = RedisServer(folder, program=PROGRAMS[kind]())
        return servers[kind]

    yield start
    for server in servers.values():
        server.stop()


@pytest.fixture(params=PROGRAMS)
def server(request, permanent):
    return permanent(request.param)


@pytest.fixture(params=["embedded", *PROGRAMS])
def make_world(request, permanent):
    """Makes empty directories of each kind in turn."""
    worlds = []

    def make():
        if request.param == "embedded":
            worlds.append(EmbeddedWorld())
        else:
            server = permanent(request.param)
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


@pytest.fixture(params=PROGRAMS)
def start(request, tmp_path):
    """Starts servers that a test may stop, each in its own folder."""
    servers, program = [], PROGRAMS[request.param]()

    def start_one(*options):
        folder = tmp_path / f"redis {len(servers)}"
        folder.mkdir()
        options = ("--repl-diskless-sync-delay", "0", *options)
        servers.append(RedisServer(folder, *options, program=program))
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
