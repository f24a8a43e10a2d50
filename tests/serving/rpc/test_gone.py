"""An engine that was replaced by another one of its name: who asks reaches that."""

import pytest

from mooncake_kernels.errors import FailureKind, TransferError
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.rpc import Peers

from .support import WAIT_S


@pytest.fixture(params=["local", "tcp", "shm"])
def transports(request):
    return {request.param, "tcp"}


@pytest.fixture
def peers(transports):
    with TransferEngine(transports=transports) as engine:
        peers = Peers(engine)
        yield peers
        peers.close()


def send(peers: Peers, name: str, data: bytes) -> None:
    peers.use(
        name, WAIT_S, lambda peer: peers.engine.write(peer, (), notify=data, deadline_s=5).wait()
    )


def test_the_next_one_is_notified(peers, transports):
    name = None  # at first a free port
    for number in range(3):
        with TransferEngine(name, transports=transports) as other:
            name = other.name
            send(peers, name, b"%d" % number)
            send(peers, name, b"again")
            told = [data for _, data in other.receive_notifications(5.0)]
            assert told + [data for _, data in other.receive_notifications()] == [
                b"%d" % number, b"again",
            ]  # fmt: skip
    with pytest.raises(TransferError):
        send(peers, name, b"nobody")


@pytest.mark.parametrize("kind", FailureKind)
def test_only_messages_to_a_gone_engine_are_retried(peers, kind):
    with TransferEngine(transports=["tcp"]) as other:
        tries = []

        def fail(peer):
            tries.append(peer)
            raise TransferError(other.name, "it fails", kind=kind)

        with pytest.raises(TransferError, match="it fails"):
            peers.use(other.name, WAIT_S, fail)
        assert len(tries) == (2 if kind is FailureKind.GONE else 1)
        assert len({*tries}) == len(tries) and not peers.is_open(other.name)
