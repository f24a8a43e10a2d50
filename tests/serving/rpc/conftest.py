"""Two engines, the first of which asks the second."""

import threading
from types import SimpleNamespace

import pytest

from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.rpc import Peers, RpcClient
from tests.waiting import eventually

from .support import CODEC


@pytest.fixture
def made():
    """``asking`` (an engine) has ``peers`` and ``client``; ``asked`` does nothing by itself."""
    before = set(threading.enumerate())
    with (
        TransferEngine(transports=["tcp"]) as asking,
        TransferEngine(transports=["tcp"]) as asked,
    ):
        peers = Peers(asking)
        client = RpcClient(peers, CODEC.encode)
        yield SimpleNamespace(
            asking=asking, asked=asked, peers=peers, client=client, name=asked.name
        )
        client.close()
        peers.close()
    eventually(lambda: set(threading.enumerate()) <= before)
