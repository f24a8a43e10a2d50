"""Peers on this machine, whose memory is mapped or addressed, and memory that is neither."""

import contextlib
import os
import signal
import socket
import threading
import time

import numpy as np
import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.errors import InvalidArgument, TransferError
from mooncake_kernels.transfer import TransferEngine

from .handshake import answer, begin
from .resources import held, settled
from .support import (
    ACK,
    HEADER,
    UNTOUCHED,
    WAIT_S,
    addressed,
    connect,
    ended,
    engine_pair,
    eventually,
    peer_process,
    untouched,
)

SIZE = 8 << 20


def shared(values: np.ndarray) -> np.ndarray:
    memory = mk.shared_memory(values.nbytes).numpy()
    memory[:] = values
    return memory


@pytest.fixture
def pair():
    with engine_pair("shm") as engines:
        yield engines


def test_shared_memory():
    memory = mk.shared_memory(4096)
    assert memory.dtype == torch.uint8 and memory.shape == (4096,)
    assert not memory.any()
    memory.view(torch.int64)[:] = 7
    for bad in (0, -1, 1.5, "4096", None, 1 << 63):
        with pytest.raises(InvalidArgument, match="shared_memory: num_bytes must be an integer"):
            mk.shared_memory(bad)


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("access", [None, "write", "read"])
@pytest.mark.parametrize("far_is_shared", [True, False])
def test_region_closed_after_listing_is_refused(pair, direction, access, far_is_shared):
    """Also if the memory is offered again. A request of several pieces is refused as a whole."""
    make = shared if far_is_shared else np.copy
    far, other = make(untouched(SIZE)), make(untouched(4096))
    here = addressed(SIZE + 4096)
    source = pair.near.register(here)
    target, gone = pair.far.register(far), pair.far.register(other)
    move = getattr(pair.near, direction)
    move(pair.peer, [(source.address, gone.address, 1)]).wait()
    before = here.copy(), far.copy(), other.copy()
    gone.close()
    if access:
        pair.far.register(other, access)
    rows = [
        (source.address, target.address, SIZE),
        (source.address + SIZE, gone.address, 4096),
    ]
    ticket = move(pair.peer, rows)
    if access == direction:
        ticket.wait()
        assert np.array_equal(here[:SIZE], far) and np.array_equal(here[SIZE:], other)
        return
    with pytest.raises(TransferError, match=r"descriptors\[1\] remote range") as caught:
        ticket.wait()
    assert caught.value.num_bytes_done == 0
    assert all(map(np.array_equal, before, (here, far, other)))


def test_open_waits_for_a_peer_with_a_full_backlog():
    """It is waited for until the deadline, and is no reason to take another transport."""
    with TransferEngine() as near, peer_process(4096) as process:
        process.stop()
        name = "\0mooncake_kernels/" + process.name.replace(":", "/")
        with contextlib.ExitStack() as opened:
            with pytest.raises(BlockingIOError):
                while True:
                    newcomer = opened.enter_context(socket.socket(socket.AF_UNIX))
                    newcomer.setblocking(False)
                    newcomer.connect(name)
            with pytest.raises(TransferError, match="deadline of 0.25 s passed") as caught:
                near.open(process.name, deadline_s=0.25)
            assert caught.value.timed_out
        later = threading.Timer(0.3, process.signal, [signal.SIGCONT])
        later.start()
        try:
            assert near.open(process.name, deadline_s=WAIT_S).transport == "shm"
        finally:
            later.join()


def test_one_request_into_memory_of_both_kinds(pair):
    near = addressed(64 << 10)
    far = [shared(untouched(32 << 10)), untouched(32 << 10)]
    here = pair.near.register(near)
    there = [pair.far.register(memory) for memory in far]
    order = np.random.default_rng(0).permutation(64)
    rows = [
        (here.address + i * 1024, there[k % 2].address + k // 2 * 1024, 1024)
        for i, k in enumerate(order.tolist())
    ]
    pair.near.write(pair.peer, rows).wait()
    for i, k in enumerate(order.tolist()):
        block = far[k % 2][k // 2 * 1024 : k // 2 * 1024 + 1024]
        np.testing.assert_array_equal(block, near[i * 1024 : i * 1024 + 1024])


def test_regions_registered_and_closed_after_open(pair):
    """Each is found although it was not there when the peer was opened, and not any more after."""
    here = pair.near.register(addressed(4096))
    for i in range(50):
        memory = shared(untouched(4096)) if i % 2 else untouched(4096)
        with pair.far.register(memory) as there:
            row = (here.address, there.address, 4096)
            pair.near.write(pair.peer, [row]).wait()
            np.testing.assert_array_equal(memory, addressed(4096))
        memory[:] = 0
        with pytest.raises(TransferError, match="is not inside a registered region"):
            pair.near.write(pair.peer, [row]).wait()
        assert not memory.any()


@pytest.mark.parametrize("access", ["read", "write"])
def test_rights(pair, access):
    here = pair.near.register(addressed(64))
    there = pair.far.register(shared(untouched(64)), access)
    row = [(here.address, there.address, 64)]
    refused = pair.near.read if access == "write" else pair.near.write
    with pytest.raises(TransferError, match="is in a region that peers may not"):
        refused(pair.peer, row).wait()
    (pair.near.write if access == "write" else pair.near.read)(pair.peer, row).wait()


def test_more_regions_than_a_control_page_has_slots():
    """The rest goes through the connection."""
    with engine_pair("shm") as pair:
        far = untouched(4200 * 64)
        regions = [pair.far.register(far[i * 64 : i * 64 + 64]) for i in range(4200)]
        here = pair.near.register(addressed(4200 * 64))
        rows = [(here.address + i * 64, there.address, 64) for i, there in enumerate(regions)]
        pair.near.write(pair.peer, rows).wait()
        np.testing.assert_array_equal(far, addressed(4200 * 64))
        for row in rows[-3:]:
            pair.near.write(pair.peer, [row]).wait()


def keep_writing(pair, row, done: threading.Event) -> tuple[threading.Thread, list[str]]:
    """A thread that writes a row until it fails or is told, and why it failed."""
    causes: list[str] = []

    def write():
        try:
            while not done.is_set():
                pair.near.write(pair.peer, [row]).wait()
        except TransferError as error:
            causes.append(error.cause)

    writer = threading.Thread(target=write)
    writer.start()
    return writer, causes


def test_closing_a_region_waits_for_copies_in_progress():
    """After close() nothing is written, however the two meet."""
    with engine_pair("shm") as pair:
        here = pair.near.register(addressed(SIZE))
        for round_ in range(8):
            memory = shared(untouched(SIZE))
            there = pair.far.register(memory)
            done = threading.Event()
            writer, causes = keep_writing(pair, (here.address, there.address, SIZE), done)
            time.sleep(0.004 * round_)
            there.close()
            memory[:] = 0
            time.sleep(0.01)
            assert not memory.any(), "it was written after close()"
            done.set()
            writer.join(WAIT_S)
            assert not writer.is_alive()
            assert all("region" in cause for cause in causes)


@pytest.mark.parametrize("far_is_shared", [True, False])
def test_memory_of_a_closed_engine_is_not_written(far_is_shared):
    """Also by a peer that is idle, and has not noticed yet."""
    with engine_pair("shm") as pair:
        memory = shared(untouched(SIZE)) if far_is_shared else untouched(SIZE)
        here, there = pair.regions(addressed(SIZE), memory)
        for size in (4096, 1 << 20):
            pair.near.write(pair.peer, [(here.address, there.address, size)]).wait()
        pair.far.close()
        memory[:] = 0
        for size in (4096, 1 << 20, SIZE):
            with pytest.raises(TransferError, match="connection (closed by peer|refused)"):
                pair.near.write(pair.peer, [(here.address, there.address, size)]).wait()
            assert not memory.any(), "it was written after close()"


@pytest.mark.parametrize("far_is_shared", [True, False])
def test_closing_an_engine_waits_for_copies_in_progress(far_is_shared):
    for round_ in range(4):
        with engine_pair("shm") as pair:
            memory = shared(untouched(SIZE)) if far_is_shared else untouched(SIZE)
            here, there = pair.regions(addressed(SIZE), memory)
            row = (here.address, there.address, SIZE)
            writer, causes = keep_writing(pair, row, threading.Event())
            time.sleep(0.004 * round_)
            pair.far.close()
            memory[:] = 0
            writer.join(WAIT_S)
            assert causes and not memory.any(), "it was written after close()"


@pytest.mark.parametrize("direction", ["write", "read"])
def test_killed_peer_is_detected_despite_mapped_memory(direction):
    with TransferEngine(transports=["shm"]) as engine, peer_process(SIZE, shared=True) as other:
        region = engine.register(addressed(SIZE))
        peer = engine.open(other.name)
        row = [(region.address, other.address, SIZE)]
        getattr(engine, direction)(peer, row).wait()
        other.signal(signal.SIGKILL)
        other.process.join()
        for rows in (row, [(region.address, other.address, 64)]):
            with pytest.raises(TransferError, match="connection (closed by peer|refused)"):
                getattr(engine, direction)(peer, rows).wait()


def test_killed_initiator_releases_the_region():
    """The control page of a dead process holds nothing back."""
    with TransferEngine() as engine:
        memory = shared(untouched(SIZE))
        region = engine.register(memory)
        with peer_process(SIZE, writes_to=(engine.name, region.address)) as other:
            eventually(lambda: memory[0] != UNTOUCHED or memory[-1] != UNTOUCHED)
            other.signal(signal.SIGKILL)
            other.process.join()
        region.close()
        memory[:] = 0
        time.sleep(0.05)
        assert not memory.any()


def test_shm_region_request_over_tcp_ends_the_connection():
    """Over tcp no one is told where the regions are."""
    with TransferEngine() as engine, connect(engine.name) as connection:
        begin(connection)
        connection.sendall(HEADER.pack(6, 0, 1, 0, 0))
        assert ended(connection)


def test_shm_requires_the_secret():
    secret = b"0123456789abcdef"
    with TransferEngine(secret=secret) as engine:
        with TransferEngine(transports=["shm"]) as stranger:
            with pytest.raises(TransferError, match="secret"):
                stranger.open(engine.name)
        with TransferEngine(transports=["shm"], secret=secret) as friend:
            near, far = friend.register(addressed(64)), engine.register(untouched(64))
            friend.write(friend.open(engine.name), [(near.address, far.address, 64)]).wait()


@pytest.mark.parametrize("count", [0, 2])
def test_descriptors_that_were_not_requested(count):
    """They are refused, and not kept."""
    given = [os.memfd_create("given") for _ in range(count)]
    listening = socket.socket(socket.AF_UNIX)
    name = f"127.0.{os.getpid() >> 8 & 255}.{os.getpid() & 255}:9"  # another run has another one
    listening.bind(f"\0mooncake_kernels/{name.replace(':', '/')}")
    listening.listen()

    def serve():
        with contextlib.suppress(OSError, EOFError):
            while True:
                connection, _ = listening.accept()
                with connection, contextlib.suppress(EOFError, ConnectionError):
                    connection.settimeout(WAIT_S)
                    answer(connection)
                    op, _, request_id, _, _ = HEADER.unpack(connection.recv(HEADER.size))
                    assert op == 6  # regions: there are none, and no control page
                    connection.sendall(ACK.pack(0, 0, request_id, 0))
                    socket.send_fds(connection, [b"x"], given)
                    connection.recv(1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with TransferEngine(transports=["shm"]) as engine:
        before = held()
        for _ in range(10):
            with pytest.raises(TransferError, match="protocol error: no descriptor"):
                engine.open(name)
        assert settled(before)
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    thread.join(WAIT_S)
    for fd in given:
        os.close(fd)
