"""Pairs of engines, and certificates; two_hosts/ is collected only where MK_TEST_WORLD says so."""

import os

import pytest

from mooncake_kernels import config
from mooncake_kernels.transfer import TransferEngine

from .certificates import authority
from .secret import OURS
from .support import engine_pair, untouched

WORLD = os.environ.get("MK_TEST_WORLD")
collect_ignore = [] if WORLD == "two_hosts" else ["two_hosts"]
collect_ignore += [] if WORLD in ("gpu", "fake_gpu") else ["gpu"]


@pytest.fixture(params=["local", "shm", "tcp"])
def pair(request):
    """Two engines of this process, joined by each transport in turn."""
    with engine_pair(request.param) as engines:
        yield engines


@pytest.fixture
def one_lane():
    """For large requests to one target that follow one another, or are in flight together.

    Two lanes that write there at once race, which ThreadSanitizer spends its time reporting though
    the race does not matter here. Gigabytes may wait in that lane, under a sanitizer on a busy
    machine for longer than the deadline that transfers have by default.
    """
    with config.override(transfer_lanes=1, deadline_s=600.0):
        yield


@pytest.fixture
def tcp_pair():
    with engine_pair("tcp") as engines:
        yield engines


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def other_ca(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("other"), "other")


@pytest.fixture(scope="module")
def node(ca):
    """The certificate and key shared by all our engines."""
    return ca.tls("node")


@pytest.fixture(scope="module")
def guarded():
    """An engine with our secret, without TLS, and its region."""
    with TransferEngine(secret=OURS, secret_only=True) as engine:
        yield engine, engine.register(untouched(4096))
