"""Engines, peers and regions close at any time, and leave nothing behind."""

import contextlib
import gc
import operator
import os
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from mooncake_kernels import _host
from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.topology import Topology
from mooncake_kernels.transfer import TransferEngine

from .resources import held, settled
from .support import (
    WAIT_S,
    addressed,
    engine_pair,
    error_of,
    eventually,
    raw_server,
    stall,
    untouched,
)

SIZE = 1 << 20
LONG = 16 << 20
MANY = 400  # of these take longer than any thread is late


def causes_of_the_failed(tickets) -> list[str]:
    """Of requests that were carried out one after the other, until something happened."""
    causes = []
    for ticket in tickets:
        try:
            ticket.wait()
            assert not causes, "it was carried out after one that failed"
        except TransferError as error:
            causes.append(error.cause)
    assert causes, "all were over before anything happened"
    return causes


@pytest.mark.parametrize("what", ["peer", "engine"])
def test_close_fails_pending_transfers(what):
    with raw_server(stall) as name, TransferEngine() as engine:
        region, peer = engine.register(addressed(SIZE)), engine.open(name)
        tickets = [engine.write(peer, [(region.address, 1, SIZE)]) for _ in range(3)]
        {"peer": peer, "engine": engine}[what].close()
        assert [error_of(ticket).cause for ticket in tickets] == [f"the {what} was closed"] * 3
        with pytest.raises(InvalidArgument, match=r"write: (the engine|peer must be open)"):
            engine.write(peer, [(region.address, 1, SIZE)])


def test_close_is_idempotent_and_in_any_order(pair):
    near, far = pair.regions(addressed(8), untouched(8))
    for _ in range(2):
        pair.peer.close()
        near.close()
    with far:
        pass
    for _ in range(2):
        pair.near.close()
        pair.far.close()
    far.close()
    pair.peer.close()
    for call in (lambda: pair.near.open(pair.far.name), lambda: pair.near.register(addressed(8))):
        with pytest.raises(InvalidArgument, match=r"the engine .* is closed"):
            call()
    for closed in (pair.near, pair.peer):
        assert closed.closed
        with pytest.raises(InvalidArgument, match="what is entered must be open, got a closed one"):
            closed.__enter__()


def test_concurrent_closes_all_see_it_closed():
    for _ in range(10):
        with engine_pair("local") as pair, ThreadPoolExecutor(4) as threads:
            near, far = pair.regions(addressed(LONG), untouched(LONG))
            row = (near.address, far.address, LONG)
            tickets = [pair.near.write(pair.peer, [row]) for _ in range(80)]

            def close(pair=pair, tickets=tickets):
                pair.near.close()
                return [ticket.done for ticket in tickets]

            eventually(lambda tickets=tickets: tickets[0].done)
            closers = [threads.submit(close) for _ in range(4)]
            assert [closer.result(WAIT_S) for closer in closers] == [[True] * 80] * 4


@pytest.mark.usefixtures("one_lane")
def test_transfers_fail_when_the_remote_engine_closes(pair):
    near, far = pair.regions(addressed(LONG), untouched(LONG))
    row = (near.address, far.address, LONG)
    tickets = [pair.near.write(pair.peer, [row]) for _ in range(MANY)]
    eventually(lambda: tickets[0].done)
    pair.far.close()
    ends = {"connection refused", "the peer's engine was closed"}
    for cause in causes_of_the_failed(tickets):  # its regions go before its connections
        assert cause in {"connection closed by peer", *ends} or "not inside a registered" in cause
    assert error_of(pair.near.write(pair.peer, [row])).cause in ends


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("closed", ["source", "target"])
@pytest.mark.usefixtures("one_lane")
def test_closed_region_is_not_touched(pair, direction, closed):
    for i in range(3):
        source, target = addressed(LONG) & 0x7F, untouched(LONG) & 0x7F
        near, far = pair.regions(*((source, target) if direction == "write" else (target, source)))
        row = (near.address, far.address, LONG)
        tickets = [getattr(pair.near, direction)(pair.peer, [row]) for _ in range(MANY)]
        eventually(lambda: tickets[i].done)  # noqa: B023
        is_near = (closed == "source") == (direction == "write")
        (near if is_near else far).close()
        memory = source if closed == "source" else target
        memory[:] = 0xFF
        # The same address again: this must not revive what was queued.
        again = pair.near.register(memory) if is_near else far
        for cause in causes_of_the_failed(tickets):
            assert "region" in cause or (not is_near and cause == "connection closed by peer")
        if closed == "source":
            assert not (target == 0xFF).any(), "it was read"
        else:
            assert (target == 0xFF).all(), "it was written"
        for region in (near, far, again):
            region.close()


def test_closed_region_is_rejected(pair):
    near, far = pair.regions(addressed(SIZE), untouched(SIZE))
    row = (near.address, far.address, SIZE)
    far.close()
    assert "is not inside a registered region" in error_of(pair.near.write(pair.peer, [row])).cause
    near.close()
    with pytest.raises(InvalidArgument, match=r"local range .* is not inside a registered region"):
        pair.near.write(pair.peer, [row])


def test_registered_memory_is_kept_alive(pair):
    near = pair.near.register(addressed(SIZE))
    far = pair.far.register(untouched(SIZE))
    address = far.address
    del far
    gc.collect()
    pair.near.write(pair.peer, [(near.address, address, SIZE)]).wait()
    back = pair.near.register(untouched(SIZE))
    pair.near.read(pair.peer, [(back.address, address, SIZE)]).wait()
    np.testing.assert_array_equal(back._buffer.owner, addressed(SIZE))


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_interrupted_as_memory_is_registered(pair, monkeypatch, error):
    """What a signal's handler raises, Python raises when the call returns: its result is lost."""
    add_region = _host.TransferEngine.add_region

    def interrupted(*arguments):
        add_region(*arguments)
        raise error

    memory = untouched(SIZE)
    with monkeypatch.context() as patch, pytest.raises(error):
        patch.setattr(_host.TransferEngine, "add_region", interrupted)
        pair.far.register(memory)
    assert not pair.far._regions
    pair.far.register(memory)


def test_restarted_engine_is_not_mistaken_for_the_old_one(tcp_pair):
    near, _ = tcp_pair.regions(addressed(SIZE), untouched(SIZE))
    name = tcp_pair.far.name
    tcp_pair.far.close()
    with TransferEngine(name) as restarted:
        region = restarted.register(untouched(SIZE))
        row = (near.address, region.address, SIZE)
        cause = error_of(tcp_pair.near.write(tcp_pair.peer, [row])).cause
        assert cause == "the peer was restarted; open it again"
        assert (region._buffer.owner == untouched(SIZE)).all()
        tcp_pair.near.write(tcp_pair.near.open(name), [row]).wait()
        assert (region._buffer.owner == addressed(SIZE)).all()


def test_repr_of_handles(pair):
    near, far = pair.regions(addressed(8), untouched(8))
    assert repr(near) == f"Region({near.address:#x} + 8 bytes on cpu:0, read_write)"
    ticket = pair.near.write(pair.peer, [(near.address, far.address, 8)])
    ticket.wait()
    assert repr(ticket) == "Ticket(8 bytes, over)"
    pair.peer.close()
    assert repr(pair.peer) == f"Peer({pair.far.name} by {pair.peer.transport}, closed)"
    assert repr(pair.near) == f"TransferEngine({pair.near.name})"
    pair.near.close()
    assert repr(pair.near) == f"TransferEngine({pair.near.name}, closed)"


def test_an_unclosed_engine_warns_and_is_closed():
    engine = TransferEngine()
    name = engine.name
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del engine
        gc.collect()
    assert any(f"unclosed TransferEngine {name}" in str(w.message) for w in caught)
    TransferEngine(name).close()  # the port is free again


@pytest.mark.parametrize(
    ("arguments", "error"), [({"nme": 1}, TypeError), ({"spin_us": -1}, InvalidArgument)]
)
def test_failed_construction_raises_nothing_unraisable(monkeypatch, arguments, error):
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    with pytest.raises(error):
        TransferEngine(**arguments)
    gc.collect()
    assert not unraisable


def test_engine_accepts_any_topology():
    """Also of one without NICs, as ``transports`` does not name ``rdma``."""
    with TransferEngine(topology=Topology.discover()) as near, TransferEngine() as far:
        assert near.open(far.name).transport == "local"


def test_close_races_with_open_and_submit():
    for i in range(10):
        with TransferEngine() as far, ThreadPoolExecutor(4) as threads:
            near = TransferEngine(transports=["tcp"])
            region, target = near.register(addressed(SIZE)), far.register(untouched(SIZE))
            name, size = far.name, SIZE // 4

            def use_until_closed(at, near=near, name=name, size=size):
                with contextlib.suppress(TransferError, InvalidArgument):
                    while True:
                        near.write(near.open(name), [(*at, size)]).wait()

            starts = [(region.address + k * size, target.address + k * size) for k in range(4)]
            users = [threads.submit(use_until_closed, at) for at in starts]
            time.sleep(i * 3e-3)
            near.close()
            for user in users:
                user.result(WAIT_S)


def test_a_closed_peer_is_disconnected(tcp_pair):
    before = num_descriptors_and_threads()
    peer = tcp_pair.near.open(tcp_pair.far.name)
    peer.close()  # and kept
    eventually(lambda: num_descriptors_and_threads()[1] <= before[1])


def num_descriptors_and_threads() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


@pytest.mark.parametrize("transport", ["local", "shm", "tcp"])
def test_engine_pairs_leak_no_resources(transport):
    def life():
        with engine_pair(transport) as pair:
            near, far = pair.regions(addressed(64), untouched(64))
            pair.near.write(pair.peer, [(near.address, far.address, 64)], notify=b"x").wait()

    life()
    before = held()
    for _ in range(30):
        life()
    assert settled(before), f"{before} became {held()}"


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_ended_connections_are_released(transport):
    with engine_pair(transport) as pair:
        pair.regions(addressed(64), untouched(64))
        before = num_descriptors_and_threads()
        for _ in range(10):
            with contextlib.ExitStack() as open_at_once:
                for _ in range(10):
                    open_at_once.enter_context(pair.near.open(pair.far.name))
        del open_at_once  # and with it the peers
        # Fewer, where a test before this one had left some that have ended meanwhile.
        eventually(lambda: not any(map(operator.gt, num_descriptors_and_threads(), before)))
