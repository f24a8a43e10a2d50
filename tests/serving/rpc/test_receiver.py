"""Everything that arrives is taken, whatever happens meanwhile."""

import logging
import threading

import pytest

from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.rpc import Receiver
from tests.waiting import eventually


@pytest.fixture
def send(made):
    with made.asking.open(made.name) as peer:
        yield lambda data: made.asking.write(peer, [], notify=data).wait()


def test_messages_after_a_bad_one_are_still_handled(made, send, caplog):
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
    eventually(lambda: len(taken) == 2)
    receiver.close()
    receiver.close()
    assert taken == [(made.asking.name, b"one"), (made.asking.name, b"two")] and receiver.closed
    assert f"from {made.asking.name}: decode: it must be something else" in caplog.text
    assert f"a message from {made.asking.name} is dropped" in caplog.text


def test_tend_runs_without_messages_and_after_an_error(made, send, caplog):
    times, taken = [], []

    def tend():
        times.append(1)
        raise ZeroDivisionError

    receiver = Receiver(made.asked, lambda *one: taken.append(one), tend, lambda: 0.01, "receiver")
    eventually(lambda: len(times) >= 3)
    send(b"one")
    eventually(lambda: taken)
    receiver.close()
    assert "ZeroDivisionError" in caplog.text


def test_close_handles_arrived_messages_and_rejects_the_rest(made, send):
    taken = []
    is_tending, go_on = threading.Event(), threading.Event()

    def tend():
        is_tending.set()
        go_on.wait(30)

    receiver = Receiver(made.asked, lambda _, data: taken.append(data), tend, lambda: 0.01, "end")
    assert is_tending.wait(30)
    send(b"in time")
    closing = threading.Thread(target=receiver.close)
    closing.start()
    eventually(lambda: receiver.closed)
    go_on.set()
    closing.join()
    assert taken == [b"in time"]
    with pytest.raises(TransferError, match="the peer receives no notifications any more"):
        send(b"late")
    assert taken == [b"in time"] and made.asked.receive_notifications() == []


def test_receiver_ends_with_the_engine(caplog):
    caplog.set_level(logging.WARNING)
    with TransferEngine(transports=["tcp"]) as engine:
        receiver = Receiver(engine, lambda *_: None, lambda: None, lambda: 0.01, "receiver")
    eventually(lambda: not receiver._thread.is_alive())
    assert "hears no longer" in caplog.text and not receiver.closed
    receiver.close()
