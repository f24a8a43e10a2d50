"""An abandoned request ends its connection, but not the requests behind it."""

import time

import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from .handshake import answer, receive_exactly
from .proxy import Proxy
from .support import ACK, HEADER, RANGE, WAIT_S, ZEROS, addressed, raw_server, untouched

SIZE = 1 << 16
FRAME = HEADER.size + RANGE.size + len(ZEROS) + SIZE  # of a write


class Held:
    """Two engines, and what one asks of the other, by a connection that may be held."""

    def __init__(self, near, far, proxy):
        self.near, self.far, self.proxy = near, far, proxy
        self.peer = near.open(proxy.name)
        self.up, self.down = proxy.relays[0].up, proxy.relays[0].down
        self.source = near.register(addressed(2 * SIZE))
        self.target = far.register(untouched(2 * SIZE))

    def write(self, at, **named):
        row = (self.source.address + at, self.target.address + at, SIZE)
        return self.near.write(self.peer, [row], **named)

    def notify(self, notification, **named):
        return self.near.write(self.peer, [], notify=notification, **named)

    def received(self):
        return [notification for _, notification in self.far.receive_notifications(WAIT_S)]

    def together(self, begin, *, num_confirmed=0):
        """Begin requests while their lane is busy, so that it takes them in one go; what arrives
        is not confirmed, but that many batches of theirs.
        """
        before = len(self.up.passed)
        self.down.hold(0)
        busy = self.write(0)
        self.up.wait(lambda flow: len(flow.passed) == before + FRAME)
        tickets = begin()
        self.down.hold((1 + num_confirmed) * ACK.size)
        busy.wait()
        return tickets


@pytest.fixture
def held():
    with (
        TransferEngine() as far,
        Proxy(far.name) as proxy,
        TransferEngine(transports=["tcp"]) as near,
    ):
        yield Held(near, far, proxy)


def give_up(ticket, how):
    if how == "cancelled":
        assert ticket.cancel()
    with pytest.raises(TransferError, match="cancelled|deadline of 0.5 s passed"):
        ticket.wait()


@pytest.mark.parametrize("how", ["cancelled", "overdue"])
def test_pending_notification_is_sent_after_earlier_request_fails(held, how):
    """It waits for the one before it to be confirmed."""
    before = len(held.up.passed)
    given_up, *others = held.together(
        lambda: [
            held.write(0, deadline_s=0.5 if how == "overdue" else None),
            held.write(SIZE, notify=b"second"),
            held.write(0, notify=b"third"),
        ]
    )
    held.up.wait(lambda flow: len(flow.passed) == before + 3 * FRAME)
    give_up(given_up, how)
    for ticket in others:
        ticket.wait()
    assert held.received() == [b"second", b"third"]
    assert (held.target._buffer.owner == held.source._buffer.owner).all()


@pytest.mark.parametrize("how", ["cancelled", "overdue"])
def test_notification_in_flight_is_not_resent(held, how):
    given_up, on_its_way = held.together(
        lambda: [
            held.write(0, deadline_s=0.5 if how == "overdue" else None),
            held.notify(b"once", deadline_s=WAIT_S),
        ]
    )
    assert held.received() == [b"once"]
    give_up(given_up, how)
    with pytest.raises(TransferError, match="given up while the notification was on it") as caught:
        on_its_way.wait()
    assert not caught.value.timed_out
    assert not on_its_way.cancel()
    held.notify(b"next").wait()
    assert held.received() == [b"next"]


def test_confirmed_request_cannot_be_cancelled(held):
    """Though its lane has not looked, busy with the one behind it."""

    def begin():
        held.up.hold(FRAME + HEADER.size + len(b"first") + FRAME // 2)
        return held.write(0, notify=b"first"), held.write(SIZE, checksum=True)

    confirmed, given_up = held.together(begin, num_confirmed=2)
    held.up.wait(lambda flow: flow.num_taken > len(flow.passed) == flow.limit)
    time.sleep(0.2)  # for it to be confirmed
    assert given_up.cancel()
    confirmed.wait()
    assert held.received() == [b"first"]


@pytest.mark.parametrize("ends", ["cancelled", "lost"])
def test_confirmed_data_counts_without_its_notification(held, ends):
    held.down.hold(ACK.size)
    ticket = held.write(0, notify=b"once")
    assert held.received() == [b"once"]
    held.down.wait(lambda flow: len(flow.passed) == flow.limit)
    time.sleep(0.2)  # for it to be confirmed
    ticket.cancel() if ends == "cancelled" else held.proxy.cut()
    with pytest.raises(TransferError) as caught:
        ticket.wait()
    assert caught.value.num_bytes_done == SIZE
    assert caught.value.only_notification_missing
    assert caught.value.delivered.tolist() == [True]
    assert str(caught.value).endswith(
        f"({SIZE} of {SIZE} bytes confirmed, but not the notification)"
    )


def test_resent_data_counts_once():
    """By each connection it is confirmed, and what compares its checksum is lost."""
    num_served = 0

    def behave(connection):
        nonlocal num_served
        answer(connection)
        _, _, request, _, size = HEADER.unpack(receive_exactly(connection, HEADER.size))
        receive_exactly(connection, FRAME - HEADER.size)
        connection.sendall(ACK.pack(0, 0, request, size))
        receive_exactly(connection, HEADER.size)
        num_served += 1
        connection.close()

    with raw_server(behave) as name, TransferEngine(transports=["tcp"]) as near:
        here, peer = near.register(addressed(SIZE)), near.open(name)
        with pytest.raises(TransferError, match="connection closed by peer") as caught:
            near.write(peer, [(here.address, 1 << 20, SIZE)], checksum=True).wait()
    assert num_served == 4
    assert caught.value.num_bytes_done == SIZE
    assert caught.value.delivered.tolist() == [False], "its checksum was to be compared"


def test_lost_connection_is_reestablished_for_pending_notification(held):
    before = len(held.up.passed)
    tickets = held.together(lambda: [held.write(0), held.write(SIZE, notify=b"once")])
    held.up.wait(lambda flow: len(flow.passed) == before + 3 * FRAME)
    held.proxy.cut()
    for ticket in tickets:
        ticket.wait()
    assert len(held.proxy.relays) == 2
    assert held.received() == [b"once"]
