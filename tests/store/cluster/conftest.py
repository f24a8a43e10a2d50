"""Hosts that share an embedded directory; two_hosts/ is collected where MK_TEST_WORLD says so."""

import os
import threading

import pytest

from mooncake_serving.store.directory import EmbeddedDirectory

from ..support import eventually
from .support import Hosts

collect_ignore = [] if os.environ.get("MK_TEST_WORLD") == "two_hosts" else ["two_hosts"]


@pytest.fixture
def hosts():
    """Makes hosts; when they are closed nothing of them is left."""
    before = set(threading.enumerate())
    made = Hosts(EmbeddedDirectory())
    yield made
    for host in made.all:
        if host.store is not None:
            assert eventually(lambda h=host: h.node.num_readers() == 0), "pins of readers are left"
    made.close()
    assert eventually(lambda: set(threading.enumerate()) <= before), "threads are left"
