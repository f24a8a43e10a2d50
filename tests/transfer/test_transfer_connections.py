"""max_connections: few connections for many peers, of which those in use stay."""

import contextlib
import random
import socket
import threading
from functools import partial
from pathlib import Path

import pytest

from mooncake_kernels import config
from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from ..store.support import child, ended_well
from ..threads import in_threads
from .support import (
    WAIT_S,
    addressed,
    close_when_it_opens,
    eventually,
    raw_server,
    stall,
    untouched,
)

SIZE = 4096


def num_connections(engine: TransferEngine, far: list[TransferEngine]) -> int:
    """How many TCP connections of this process lead to the engines' ports."""
    ports = {int(other.name.rsplit(":", 1)[1]) for other in far}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "01" and int(row[2].split(":")[1], 16) in ports for row in rows)


class Stalling:
    """Servers that say hello, and hear what is asked then, but do not answer."""

    def __init__(self):
        self._heard = threading.Semaphore(0)

    def __call__(self, connection: socket.socket) -> None:
        stall(connection)
        connection.recv(1, socket.MSG_PEEK)
        self._heard.release()

    def wait_until_asked(self, times: int) -> None:
        for _ in range(times):
            assert self._heard.acquire(timeout=WAIT_S)


@contextlib.contextmanager
def engines(count: int, transport: str, **options):
    with contextlib.ExitStack() as stack:
        near = stack.enter_context(TransferEngine(transports=[transport], **options))
        far = [stack.enter_context(TransferEngine()) for _ in range(count)]
        yield near, far


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_more_peers_than_max_connections(transport):
    most, count = 3, 8
    with engines(count, transport, max_connections=most) as (near, far):
        here = near.register(addressed(SIZE))
        there = [other.register(untouched(SIZE)) for other in far]
        peers = [near.open(other.name) for other in far]
        random.seed(5)
        for _ in range(60):
            i = random.randrange(count)
            there[i]._buffer.owner[:] = 0
            near.write(peers[i], [(here.address, there[i].address, SIZE)], notify=b"x").wait()
            assert (there[i]._buffer.owner == here._buffer.owner).all()
            assert len(far[i].receive_notifications(WAIT_S)) == 1
        paths = near.stats()["paths"]
        assert sum(sum(p["num_reconnects"] for p in paths[o.name].values()) for o in far) > 0
        assert all(p["num_failures"] == 0 for o in far for p in paths[o.name].values())
        if transport == "tcp":
            eventually(lambda: num_connections(near, far) <= most)


def test_frequently_used_peer_keeps_its_connection():
    with engines(6, "tcp", max_connections=3) as (near, far):
        here = near.register(addressed(SIZE))
        there = [other.register(untouched(SIZE)) for other in far]
        peers = [near.open(other.name) for other in far]

        def write(i):
            near.write(peers[i], [(here.address, there[i].address, SIZE)]).wait()

        def num_reconnects(i):
            return near.stats()["paths"][far[i].name]["tcp:0"]["num_reconnects"]

        write(0)
        before = num_reconnects(0)
        for _ in range(10):
            for i in range(1, 6):
                write(0)
                write(i)
        # Now and then another's thread is not quite idle yet, and it is its turn after all.
        assert num_reconnects(0) - before < 10
        assert sum(num_reconnects(i) for i in range(1, 6)) > 40


def test_threads_and_large_requests_share_limited_connections():
    size = 3 << 20  # of several pieces, for both lanes of a peer
    with config.override(transfer_lanes=2), engines(4, "tcp", max_connections=2) as (near, far):
        here = near.register(addressed(size))
        there = [other.register(untouched(size)) for other in far]
        peers = [near.open(other.name) for other in far]

        def work(i):
            for _ in range(6):
                near.write(peers[i], [(here.address, there[i].address, size)]).wait()

        in_threads(*(partial(work, i) for i in range(4)))
        assert all((region._buffer.owner == here._buffer.owner).all() for region in there)
        eventually(lambda: num_connections(near, far) <= 2)


def test_peer_in_use_is_never_disconnected():
    stalling = Stalling()
    with (
        raw_server(stalling) as name,
        TransferEngine(transports=["tcp"], max_connections=1) as near,
        TransferEngine() as far,
    ):
        here, there = near.register(addressed(SIZE)), far.register(untouched(SIZE))
        stalled = near.open(name)
        ticket = near.write(stalled, [(here.address, 1 << 20, SIZE)], deadline_s=WAIT_S)
        stalling.wait_until_asked(1)
        with pytest.raises(
            TransferError, match=r"all 1 connections \(max_connections\) are in use"
        ) as failed:
            near.open(far.name, deadline_s=0.2)
        assert failed.value.timed_out
        assert not ticket.done
        threading.Timer(0.3, ticket.cancel).start()
        peer = near.open(far.name, deadline_s=WAIT_S)  # waits for that
        near.write(peer, [(here.address, there.address, SIZE)]).wait()


def test_close_ends_wait_for_a_free_connection():
    num_places = 8  # which closing makes free one after the other
    stalling = Stalling()
    with contextlib.ExitStack() as stack:
        names = [stack.enter_context(raw_server(stalling)) for _ in range(num_places)]
        far = stack.enter_context(TransferEngine())
        near = TransferEngine(transports=["tcp"], max_connections=num_places)
        here = near.register(addressed(SIZE))
        tickets = [
            near.write(near.open(name), [(here.address, 1 << 20, SIZE)], deadline_s=WAIT_S)
            for name in names
        ]
        stalling.wait_until_asked(num_places)
        close_when_it_opens(near, far.name)
        with pytest.raises(TransferError, match="the engine was closed"):
            near.open(far.name, deadline_s=WAIT_S)
        for ticket in tickets:
            with pytest.raises(TransferError, match="the engine was closed"):
                ticket.wait()


def test_a_forked_child_holds_no_connection():
    with engines(2, "tcp", max_connections=1) as (near, far):
        peers = [near.open(other.name) for other in far]
        with child(near.close) as pid:
            assert ended_well(pid)
        for peer in peers:
            near.write(peer, [], notify=b"still").wait()
