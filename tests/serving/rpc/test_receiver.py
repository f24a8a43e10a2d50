"""Everything that arrives is taken, whatever happens meanwhile."""

import logging

import pytest

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.rpc import Receiver

from .support import wait_until


@pytest.fixture
def send(made):
    with made.asking.open(made.name) as peer:
        yield lambda data: made.asking.write(peer, [], notify=data).wait()


def test_all_is_taken_whatever_is_wrong_with_one(made, send, caplog):
    taken = []

    def take(sender, data):
        if data == b"nonsense":
            raise InvalidArgument("decode: it must be something else")
        if data == b"a fault":
            raise ZeroDivisionError
        taken.append((sender, data))

    receiver = Receiver(made.asked, take, lambda: None, lambda: 0.01, "receiver")
    for data in (b"one", b"nonsense", b"a fault", b"two"):
        send(data)
    wait_until(lambda: len(taken) == 2)
    receiver.close()
    receiver.close()
    assert taken == [(made.asking.name, b"one"), (made.asking.name, b"two")] and receiver.closed
    assert f"from {made.asking.name}: decode: it must be something else" in caplog.text
    assert f"a message from {made.asking.name} is dropped" in caplog.text


def test_tending_goes_on_without_messages_and_after_a_fault(made, send, caplog):
    times, taken = [], []

    def tend():
        times.append(1)
        raise ZeroDivisionError

    receiver = Receiver(made.asked, lambda *one: taken.append(one), tend, lambda: 0.01, "receiver")
    wait_until(lambda: len(times) >= 3)
    send(b"one")
    wait_until(lambda: taken)
    receiver.close()
    assert "ZeroDivisionError" in caplog.text


def test_it_ends_with_the_engine(caplog):
    caplog.set_level(logging.WARNING)
    with TransferEngine(transports=["tcp"]) as engine:
        receiver = Receiver(engine, lambda *_: None, lambda: None, lambda: 0.01, "receiver")
    wait_until(lambda: not receiver._thread.is_alive())
    assert "hears no longer" in caplog.text and not receiver.closed
    receiver.close()
