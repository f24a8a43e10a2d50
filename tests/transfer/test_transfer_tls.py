"""The same transfers over TLS."""

import contextlib
import dataclasses
import ssl
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mooncake_kernels as mk
from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import Tls, TransferEngine

from .handshake import Hello, answer, begin, receive_exactly
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
    close_when_it_opens,
    connect,
    raw_server,
    untouched,
)
from .tls import SECRET, engines, tls_server

SIZE = 1 << 20
RECORD = 16 << 10


def test_tls_is_exported():
    assert mk.Tls is Tls


@pytest.mark.parametrize("secret", [None, SECRET])
@pytest.mark.parametrize("verified", [True, False])
def test_bytes_arrive(node, verified, secret):
    tls = node if verified else dataclasses.replace(node, ca=None)
    with engines(tls, tls, secret=secret) as (near, far):
        source, target = addressed(SIZE), untouched(SIZE)
        mine, theirs = near.register(source), far.register(target)
        peer = near.open(far.name)
        for num_bytes in (1, 3, RECORD - 1, RECORD, RECORD + 1, 5 * RECORD + 7, SIZE):
            target[:], back = UNTOUCHED, untouched(SIZE)
            near.write(peer, [(mine.address, theirs.address, num_bytes)], notify=b"!").wait()
            assert (target[:num_bytes] == source[:num_bytes]).all()
            assert (target[num_bytes:] == UNTOUCHED).all()
            assert far.receive_notifications() == [(near.name, b"!")]
            with near.register(back) as landing:
                near.read(peer, [(landing.address, theirs.address, num_bytes)]).wait()
            assert (back[:num_bytes] == source[:num_bytes]).all()
            assert (back[num_bytes:] == UNTOUCHED).all()


@given(sizes=st.lists(st.integers(1, 2 * RECORD), min_size=1, max_size=60), seed=st.integers(0, 99))
@settings(max_examples=12, deadline=None)
def test_parts_of_all_sizes(node, sizes, seed):
    """Small parts share a record, large ones take several."""
    gaps = np.random.default_rng(seed).integers(0, 100, len(sizes))
    starts = np.cumsum([0, *sizes[:-1]]) + np.cumsum(gaps)
    total = int(starts[-1]) + sizes[-1]
    with engines(node, node) as (near, far):
        source, target = addressed(total), untouched(total)
        mine, theirs = near.register(source), far.register(target)
        peer = near.open(far.name)
        rows = [
            (mine.address + int(at), theirs.address + int(at), size)
            for at, size in zip(starts, sizes, strict=True)
        ]
        expected = untouched(total)
        for at, size in zip(starts, sizes, strict=True):
            expected[at : at + size] = source[at : at + size]
        near.write(peer, rows).wait()
        np.testing.assert_array_equal(target, expected)
        source[:] = UNTOUCHED
        near.read(peer, rows).wait()
        np.testing.assert_array_equal(source, expected)


@pytest.mark.usefixtures("one_lane")
def test_rekeying_after_256_mib(node):
    """A key is good for 256 MiB; the next comes in time, in either direction."""
    size = 64 << 20
    with engines(node, node) as (near, far):
        source, target = addressed(size), untouched(size)
        mine, theirs = near.register(source), far.register(target)
        peer = near.open(far.name)
        row = (mine.address, theirs.address, size)
        for _ in range(5):
            near.write(peer, [row]).wait()
        assert (target == source).all()
        source[:] = UNTOUCHED
        for _ in range(5):
            near.read(peer, [row]).wait()
        assert (target == source).all()
        near.write(peer, [row]).wait()


def test_traffic_is_encrypted_on_one_connection(node):
    with engines(node, node) as (near, far):
        source = np.frombuffer(b"plain as can be " * 4096, np.uint8)
        mine, theirs = near.register(source, access="read"), far.register(untouched(source.size))
        with Proxy(far.name) as proxy:
            peer = near.open(proxy.name)
            row = (mine.address, theirs.address, mine.num_bytes)
            for _ in range(3):
                near.write(peer, [row], notify=b"plain as can be").wait()
            [relay] = proxy.relays
            assert len(relay.up.passed) > 3 * source.size
            for flow in (relay.up, relay.down):
                assert b"plain as can be" not in flow.passed and b"MKTRNSFR" not in flow.passed
                assert far.name.encode() not in flow.passed


def test_wire_format_with_python_ssl(ca, node):
    """Python's ssl on the other side."""
    with TransferEngine(tls=node) as engine:
        region = engine.register(untouched(64))
        files = ca.issue("byhand")
        context = ssl.create_default_context(cafile=ca.root)
        context.load_cert_chain(files["certificate"], files["key"])
        with connect(engine.name) as connection:
            with context.wrap_socket(connection, server_hostname="127.0.0.1") as secure:
                begin(secure, hello=Hello(flags=2))
                secure.sendall(
                    HEADER.pack(WRITE, 1, 1, 0, 64)
                    + RANGE.pack(region.address, 64)
                    + ZEROS
                    + bytes(64)
                )
                assert receive_exactly(secure, ACK.size) == ACK.pack(0, 0, 1, 64)
        assert (region._buffer.owner == 0).all()


@pytest.mark.usefixtures("one_lane")
def test_transfer_after_a_cancelled_one(node):
    size = 16 << 20
    with engines(node, node) as (near, far):
        source, target = addressed(size), untouched(size)
        mine, theirs = near.register(source), far.register(target)
        peer = near.open(far.name)
        row = (mine.address, theirs.address, size)
        for number in range(5):
            tickets = [near.write(peer, [row]) for _ in range(50)]
            threading.Event().wait(0.01)
            for ticket in reversed(tickets):  # the running one last
                ticket.cancel()
            source[:] = number
            near.write(peer, [row]).wait()
            assert (target == number).all()


@contextlib.contextmanager
def stalled(ca):
    """An engine, and a peer that has shaken hands and then neither reads nor answers."""
    files = ca.issue("stalled")
    done = threading.Event()

    def stall(secure):
        answer(secure)
        done.wait(WAIT_S)

    with tls_server(files, stall) as name:
        with TransferEngine(transports=["tcp"], tls=ca.tls("mine")) as engine:
            try:
                yield engine, engine.open(name), engine.register(addressed(64 << 20))
            finally:
                done.set()


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("how", ["cancel", "deadline", "peer", "region", "engine"])
@pytest.mark.usefixtures("one_lane")
def test_stalled_transfer_ends_on_deadline_cancel_or_close(ca, how, direction):
    with stalled(ca) as (engine, peer, region):
        deadline_s = 0.2 if how == "deadline" else None
        row = (region.address, 4096, region.num_bytes)
        ticket = getattr(engine, direction)(peer, [row], deadline_s=deadline_s)
        threading.Event().wait(0.05)
        if how == "cancel":
            assert ticket.cancel()
        elif how != "deadline":
            {"peer": peer, "region": region, "engine": engine}[how].close()
        cause = {
            "cancel": "cancelled",
            "deadline": "deadline of 0.2 s passed",
            "peer": "the peer was closed",
            "region": "a region in use was closed",
            "engine": "the engine was closed",
        }[how]
        with pytest.raises(TransferError) as caught:
            ticket.wait(WAIT_S)
        assert caught.value.cause == cause


@pytest.mark.parametrize("how", ["deadline", "close"])
def test_stalled_handshake_ends_on_deadline_or_close(node, how):
    with raw_server(lambda connection: None) as name:
        with TransferEngine(transports=["tcp"], tls=node) as engine:
            if how == "deadline":
                with pytest.raises(TransferError, match="deadline of 0.1 s passed"):
                    engine.open(name, deadline_s=0.1)
                return
            close_when_it_opens(engine, name)
            with pytest.raises(TransferError, match="the engine was closed"):
                engine.open(name, deadline_s=2 * WAIT_S)
