"""Shared by the transfer tests: hashed data, a pair of engines, a peer process, a raw peer."""

import contextlib
import functools
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest

from mooncake_kernels.buffers import shared_memory
from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import Peer, Region, Ticket, TransferEngine

from ..stopping import stop
from ..waiting import eventually
from .handshake import answer, receive_exactly

UNTOUCHED = 0xEE  # what targets start full of, so that a byte written by mistake shows
WAIT_S = 20.0  # longer than anything here takes; a test that needs it has failed
START_S = 180.0  # the same of a process, the first of which imports torch, to start

HEADER = struct.Struct("<IIQQQ32x")  # op, num_ranges, request_id, first_range, num_bytes; no MAC
ACK = struct.Struct("<IIQQ40x")  # status, refusal_bytes, request_id, num_bytes; no MAC
RANGE = struct.Struct("<QQ")  # address, num_bytes
ZEROS = bytes(48)  # between the table of a write, if it has one entry, and its payload
WRITE, READ, CHECK_WRITE, CHECK_READ, NOTIFY = range(1, 6)


def _hashed(num_bytes: int) -> np.ndarray:
    position = np.arange(num_bytes, dtype=np.uint32)
    return (position * np.uint32(2654435761) >> np.uint32(13)).astype(np.uint8)


_kept = functools.cache(_hashed)


def addressed(num_bytes: int) -> np.ndarray:
    """Bytes hashed from their own position: a block from the wrong place differs."""
    for size in (1 << 20, 8 << 20, 65 << 20):  # what is asked for often
        if num_bytes <= size:
            return _kept(size)[:num_bytes].copy()
    return _hashed(num_bytes)


def untouched(num_bytes: int) -> np.ndarray:
    return np.full(num_bytes, UNTOUCHED, np.uint8)


def error_of(ticket: Ticket) -> TransferError:
    """Why a request failed, once it has."""
    with pytest.raises(TransferError) as caught:
        ticket.wait()
    assert ticket.done
    return caught.value


def close_when_it_opens(engine: TransferEngine, name: str) -> None:
    """Close the engine, in a thread, a moment after it has begun to open a peer of that name."""

    def close():
        if eventually(lambda: name in engine.stats()["peers"]):
            time.sleep(0.1)
            engine.close()

    threading.Thread(target=close, daemon=True).start()


@dataclass
class Pair:
    """Two engines, and how the first reaches the second."""

    near: TransferEngine
    far: TransferEngine
    peer: Peer

    def regions(self, near: np.ndarray, far: np.ndarray) -> tuple[Region, Region]:
        return self.near.register(near), self.far.register(far)


@contextlib.contextmanager
def engine_pair(transport: str):
    near, far = TransferEngine(transports=[transport]), TransferEngine()
    with near, far, near.open(far.name) as peer:
        assert peer.transport == transport
        yield Pair(near, far, peer)


def serve(pipe, num_bytes: int, shared: bool, writes_to: tuple[str, int] | None) -> None:
    """The main loop of a peer process: offer memory, then write without end, or wait to be told."""
    engine = TransferEngine()
    memory = shared_memory(num_bytes).numpy() if shared else np.zeros(num_bytes, np.uint8)
    region = engine.register(memory)
    pipe.send((engine.name, region.address))
    if writes_to:
        name, address = writes_to
        peer = engine.open(name)
        while True:
            engine.write(peer, [(region.address, address, num_bytes)]).wait()
    pipe.recv()


@dataclass
class Process:
    """A peer in a separate process."""

    process: multiprocessing.Process
    name: str
    address: int

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        stop(self.process.pid)


@contextlib.contextmanager
def peer_process(num_bytes: int, *, shared: bool = False, writes_to: tuple[str, int] | None = None):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(
        target=serve, args=(theirs, num_bytes, shared, writes_to), daemon=True
    )
    process.start()
    theirs.close()
    try:
        assert ours.poll(START_S), "the peer process did not start"
        yield Process(process, *ours.recv())
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.join(WAIT_S)
        ours.close()


def connect(name: str) -> socket.socket:
    host, port = name.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def ended(connection: socket.socket) -> bool:
    """Whether the engine has closed the connection without sending anything."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def refusal(connection: socket.socket) -> str:
    status, size, _, num_bytes = ACK.unpack(receive_exactly(connection, ACK.size))
    assert (status, num_bytes) == (1, 0)
    return receive_exactly(connection, size).decode()


def send_last(connection: socket.socket, data: bytes) -> None:
    """Send, and signal the end of input; the other side may have hung up already."""
    with contextlib.suppress(OSError):
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def raw_server(behave, *, narrow: bool = False, join=lambda: None):
    """A server that runs ``behave(connection)`` for each connection; yields its name.

    ``narrow``: only some ten KiB may be sent without being read. ``join()`` waits for threads that
    ``behave`` has started: a connection must not be closed under them.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    if narrow:
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connections = []
    ending = threading.Event()

    def run():
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            connection.settimeout(WAIT_S)
            connections.append(connection)
            if ending.is_set():
                return
            with contextlib.suppress(OSError, EOFError):
                behave(connection)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        ending.set()
        for end in [listening, *connections]:
            with contextlib.suppress(OSError):  # closed already
                end.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT_S)
        join()
        for end in [listening, *connections]:
            end.close()


def stall(connection: socket.socket) -> None:
    """A peer that says hello and then neither reads nor answers; does not close either."""
    answer(connection)


def hang_up_after_hello(connection: socket.socket) -> None:
    stall(connection)
    connection.close()
