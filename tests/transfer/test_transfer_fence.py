"""Bytes written before a reconnect never land after it."""

import socket
import struct
import threading

import numpy as np
import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from .handshake import (
    OLD_EPOCH,
    SECRET,
    WELCOMED,
    Frames,
    Hello,
    begin,
    begin_both,
    hear_hello,
    hear_welcome,
    receive_exactly,
)
from .proxy import Proxy
from .support import (
    ACK,
    HEADER,
    RANGE,
    UNTOUCHED,
    WAIT_S,
    WRITE,
    ZEROS,
    addressed,
    connect,
    ended,
    send_last,
    untouched,
)

SIZE = 1 << 16
FENCE = 12
FRAME = HEADER.size + RANGE.size  # what goes before the payload of a write of one range


@pytest.fixture
def target():
    with TransferEngine() as engine:
        yield engine, engine.register(untouched(SIZE))


def verdict(name: str, hello: Hello) -> int:
    with connect(name) as connection:
        connection.sendall(hello.packed())
        hear_hello(connection)
        return hear_welcome(connection)[0]


@pytest.mark.parametrize(
    ("given_up", "after"),
    [("cancelled", after) for after in (0, 1, FRAME - 1, FRAME, FRAME + 1, FRAME + SIZE // 2)]
    + [("overdue", after) for after in (0, FRAME + SIZE // 2)]
    + [(how, FRAME + SIZE // 2) for how in ("cancelled, opened twice", "peer closed")],
)
def test_late_write_is_discarded(target, after, given_up):
    """The engine is the same, whether a peer is opened once, twice or anew."""
    far, landing = target
    with Proxy(far.name) as proxy, TransferEngine(transports=["tcp"]) as near:
        old, new = near.register(addressed(SIZE)), near.register(addressed(SIZE) ^ 0x55)
        peer = near.open(proxy.name)
        other = near.open(proxy.name) if given_up == "cancelled, opened twice" else peer
        late = proxy.relays[0].up
        late.hold(after)  # the rest of the write is on its way for now
        rest = late.limit
        row = (old.address, landing.address, SIZE)
        ticket = near.write(peer, [row], deadline_s=1.0 if given_up == "overdue" else None)
        late.wait(lambda flow: len(flow.passed) == rest < flow.num_taken)
        if given_up == "peer closed":
            peer.close()
        elif given_up != "overdue":
            assert ticket.cancel()
        with pytest.raises(TransferError):
            ticket.wait()
        if given_up == "peer closed":
            other = near.open(proxy.name)
        near.write(other, [(new.address, landing.address, SIZE)]).wait()
        assert len(proxy.relays) == 2 or other is not peer
        late.release()
        late.wait(lambda flow: flow.ended)
        proxy.relays[0].down.wait(lambda flow: flow.ended)  # the old session is gone
        np.testing.assert_array_equal(landing._buffer.owner, addressed(SIZE) ^ 0x55)


def test_data_in_flight_on_another_lane_does_not_land(target):
    """Nothing follows on its connection: another one has it ended before it goes on."""
    far, _ = target
    size, step = 8 << 20, 1 << 20
    landing = far.register(untouched(size))
    with Proxy(far.name) as proxy, TransferEngine(transports=["tcp"]) as near:
        old, new = near.register(untouched(size)), near.register(addressed(size))
        peer = near.open(proxy.name)
        for _ in range(100):  # until both lanes have had something to do
            near.write(peer, [(old.address, landing.address, size)]).wait()
            if len(proxy.relays) == 2 and len(proxy.relays[1].up.passed) > step:
                break
        lead, late = (relay.up for relay in proxy.relays)
        for flow in (lead, late):  # both: else the leading lane may have done all before this one
            flow.hold(FRAME + 1000)
        ticket = near.write(peer, [(old.address, landing.address, size)])
        late.wait(lambda flow: len(flow.passed) == flow.limit < flow.num_taken)
        most = len(lead.passed) + size - 3 * step  # but what is held, and what follows it there
        lead.release()
        lead.wait(lambda flow: len(flow.passed) > most)
        assert ticket.cancel()
        for at in range(0, size, step):  # on the leading lane alone
            near.write(peer, [(new.address + at, landing.address + at, step)]).wait()
        late.release()
        late.wait(lambda flow: flow.ended)
        proxy.relays[1].down.wait(lambda flow: flow.ended)
        np.testing.assert_array_equal(landing._buffer.owner, addressed(size))


@pytest.mark.parametrize("epoch", [1, 2])
def test_fence_on_another_connection_ends_lost_one(target, epoch):
    far, region = target
    write = (
        HEADER.pack(WRITE, 1, 1, 0, SIZE) + RANGE.pack(region.address, SIZE) + ZEROS + bytes(SIZE)
    )
    fence = HEADER.pack(FENCE, 0, 0, 0, 16) + struct.pack("<QQ", 5, epoch)
    with connect(far.name) as lost, connect(far.name) as other:
        begin(lost, hello=Hello(link=5, epoch=1))
        begin(other, hello=Hello(link=6))
        lost.sendall(write[: FRAME + 10])
        other.sendall(fence)
        assert receive_exactly(other, ACK.size) == ACK.pack(0, 0, 0, 16)
        assert ended(lost)
        assert verdict(far.name, Hello(link=5, epoch=epoch)) == OLD_EPOCH
        assert verdict(far.name, Hello(link=5, epoch=epoch + 1)) == WELCOMED
        with connect(far.name) as later:
            begin(later, hello=Hello(link=5, epoch=9))
            other.sendall(fence)  # of what is over
            assert receive_exactly(other, ACK.size) == ACK.pack(0, 0, 0, 16)
            later.sendall(write)
            assert receive_exactly(later, ACK.size) == ACK.pack(0, 0, 1, SIZE)


@pytest.mark.parametrize("payload", [struct.pack("<QQ", 6, 1), bytes(15), bytes(16 * 4097)])
def test_malformed_fence_ends_the_connection(target, payload):
    with connect(target[0].name) as connection:
        begin(connection, hello=Hello(link=6))
        send_last(connection, HEADER.pack(FENCE, 0, 0, 0, len(payload)) + payload)
        assert ended(connection)


@pytest.mark.usefixtures("one_lane")
def test_cancelled_write_does_not_land_later(target):
    """Without a proxy: what lies in the buffers of TCP comes late enough by itself."""
    far, _ = target
    size, rounds = 4 << 20, 16
    landing = far.register(untouched(size))
    with TransferEngine(transports=["tcp"]) as near:
        sources = [near.register(np.full(size, number + 1, np.uint8)) for number in range(rounds)]
        peer = near.open(far.name)
        for number, source in enumerate(sources):
            row = (source.address, landing.address, size)
            if number % 2 == 0:
                for ticket in reversed([near.write(peer, [row]) for _ in range(50)]):
                    ticket.cancel()
                continue
            near.write(peer, [row]).wait()
            for _ in range(3):
                assert (landing._buffer.owner == number + 1).all()


def test_stale_epochs_are_rejected(target):
    name = target[0].name
    assert verdict(name, Hello(link=5, epoch=0)) == OLD_EPOCH
    for epoch, expected in [(3, WELCOMED), (3, OLD_EPOCH), (2, OLD_EPOCH), (4, WELCOMED)]:
        assert verdict(name, Hello(link=5, epoch=epoch)) == expected
    assert verdict(name, Hello(link=5, epoch=2**64 - 1)) == WELCOMED
    assert verdict(name, Hello(link=5, epoch=1)) == OLD_EPOCH
    assert verdict(name, Hello(link=6, epoch=1)) == WELCOMED  # another link, another engine
    assert verdict(name, Hello(link=5, epoch=1, instance=8)) == WELCOMED
    assert target[0].rejections() == {}  # a later connection was faster: nothing to worry about


@pytest.mark.parametrize("sent", [0, 10, FRAME, FRAME + 100])
def test_higher_epoch_ends_earlier_connection(target, sent):
    far, region = target
    write = (
        HEADER.pack(WRITE, 1, 1, 0, SIZE) + RANGE.pack(region.address, SIZE) + ZEROS + bytes(SIZE)
    )
    with connect(far.name) as old, connect(far.name) as new, connect(far.name) as other:
        begin(other, hello=Hello(link=6))
        begin(old, hello=Hello(link=5, epoch=1))
        old.sendall(write[:sent])
        begin(new, hello=Hello(link=5, epoch=2))
        region._buffer.owner[:] = UNTOUCHED
        with pytest.raises(OSError):  # reset, for it is gone
            while True:
                old.sendall(write[sent:])
        assert ended(old)
        assert (region._buffer.owner == UNTOUCHED).all()
        for connection in (new, other):
            connection.sendall(write)
            assert receive_exactly(connection, ACK.size) == ACK.pack(0, 0, 1, SIZE)


def test_highest_epoch_wins_among_concurrent_connections(target):
    far, _ = target
    start = threading.Barrier(8)
    won: list[tuple[int, socket.socket]] = []
    verdicts: list[int] = []

    def race(epochs):
        start.wait(WAIT_S)
        for epoch in epochs:
            connection = connect(far.name)
            connection.sendall(Hello(link=5, epoch=epoch).packed())
            hear_hello(connection)
            try:
                verdicts.append(hear_welcome(connection)[0])
            except EOFError:  # another has come just before it was let in
                verdicts.append(OLD_EPOCH)
            if verdicts[-1] == WELCOMED:
                won.append((epoch, connection))
            else:
                connection.close()

    threads = [threading.Thread(target=race, args=(range(i + 1, 160, 8),)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert len(verdicts) == 159 and set(verdicts) <= {WELCOMED, OLD_EPOCH}
    *losers, (epoch, last) = sorted(won, key=lambda item: item[0])
    assert epoch == 159
    assert all(ended(connection) for _, connection in losers)
    last.sendall(
        HEADER.pack(WRITE, 1, 1, 0, 4) + RANGE.pack(target[1].address, 4) + ZEROS + bytes(4)
    )
    assert receive_exactly(last, ACK.size) == ACK.pack(0, 0, 1, 4)
    for _, connection in won:
        connection.close()


def test_stranger_cannot_fence_a_connection():
    secret = b"s" * 16
    with TransferEngine(secret=secret, secret_only=True) as far, connect(far.name) as mine:
        hellos = begin_both(mine, secret, Hello(link=5, epoch=1, flags=SECRET))
        frames = Frames(secret, *(hello.packed() for hello in hellos))
        assert verdict(far.name, Hello(link=5, epoch=2)) != WELCOMED
        with connect(far.name) as other, pytest.raises(AssertionError):
            begin(other, b"another secret here", Hello(link=5, epoch=3))
        region = far.register(untouched(SIZE))
        header, table = HEADER.pack(WRITE, 1, 1, 0, 4), RANGE.pack(region.address, 4)
        mine.sendall(frames.signed(header, table) + ZEROS + bytes(4))
        assert ACK.unpack(receive_exactly(mine, ACK.size)) == (0, 0, 1, 4)
