"""Hosts that share an embedded directory; two_hosts/ is collected where MK_TEST_WORLD says so."""

import os
import threading

import pytest

from mooncake_serving.store.cluster import node_server as server
from mooncake_serving.store.directory import EmbeddedDirectory, connect

from ..support import eventually
from .support import Hosts

collect_ignore = [] if os.environ.get("MK_TEST_WORLD") == "two_hosts" else ["two_hosts"]


@pytest.fixture(autouse=True)
def _closed_soon(monkeypatch):
    """Nodes notice their end at once."""
    monkeypatch.setattr(server, "POLL_S", 0.01)


@pytest.fixture
def hosts_with_redis(redis):
    """Makes hosts whose directory is in Redis."""
    with connect(redis.url) as servers:
        made = Hosts(servers)
        yield made
        made.close()


@pytest.fixture
def hosts():
    """Makes hosts; when they are closed, nothing of theirs may be left."""
    before = set(threading.enumerate())
    made = Hosts(EmbeddedDirectory())
    yield made
    try:
        for host in made.all:
            eventually(lambda h=host: h.node.num_readers() == 0, "pins of readers are left")
    finally:
        made.close()
    eventually(lambda: set(threading.enumerate()) <= before, "threads are left")
