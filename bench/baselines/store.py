"""The stores of bench_store_peers: this project's, Mooncake's, Redis, and what bounds them.

Each is a client in the bench's own process, made after a holder in a separate process has put the
values (`hold`). All clients have the same calls: `get` and `put` move a value to and from a place
of the same memory.
"""

import contextlib
import os
import shutil
import socket
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import mooncake_kernels as mk
from lib.processes import free_port, new_processes
from mooncake_serving.compat.mooncake.store import MooncakeDistributedStore
from mooncake_serving.store import ClusterStore, Node, Store, directory

WAIT_S = 60.0
TOTAL = 16 << 20  # of each size
SIZES = {"64 KiB": 64 << 10, "1 MiB": 1 << 20, "16 MiB": 16 << 20}
SEGMENT = 256 << 20
SMALL = 64
SMALL_KEYS = [f"small/{i}" for i in range(512)]


class Missing(Exception):
    """A peer that is not available on this machine, and why."""


def values() -> np.ndarray:
    """The bytes of all values of a size, the same in every process."""
    return np.random.default_rng(1).integers(0, 256, TOTAL, np.uint8)


def key_of(size: int, index: int) -> str:
    return f"value/{size}/{index}"


class Memory:
    """Where values are moved to and from."""

    def __init__(self) -> None:
        self.bytes = np.zeros(TOTAL, np.uint8)
        self.address = self.bytes.ctypes.data
        self.view = memoryview(self.bytes)


class ByAddress:
    """Ours and Mooncake's, by the same calls."""

    def __init__(self, store: Any, memory: Memory):
        self.store = store
        self.memory = memory
        assert store.register_buffer(memory.address, TOTAL) == 0

    def get(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        if len(keys) == 1:
            assert self.store.get_into(keys[0], self.memory.address + offsets[0], size) == size
            return
        places = [self.memory.address + offset for offset in offsets]
        assert self.store.batch_get_into(keys, places, [size] * len(keys)) == [size] * len(keys)

    def put(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        if len(keys) == 1:
            assert self.store.put_from(keys[0], self.memory.address + offsets[0], size) == 0
            return
        places = [self.memory.address + offset for offset in offsets]
        assert not any(self.store.batch_put_from(keys, places, [size] * len(keys)))

    def get_pieces(self, key: str, offsets: Sequence[int], size: int) -> None:
        places = [self.memory.address + offset for offset in offsets]
        [code] = self.store.batch_get_into_multi_buffers([key], [places], [[size] * len(places)])
        assert code == size * len(offsets)

    def remove(self, keys: list[str]) -> None:
        assert not any(self.store.batch_remove(keys, True))

    def exists(self, keys: list[str]) -> bool:
        return all(self.store.batch_is_exist(keys))

    def close(self) -> None:
        self.store.close()


class Native:
    """Ours by its own API: a pool of this host."""

    def __init__(self, store: Store, memory: Memory):
        self.store = store
        self.view = memory.view

    def get(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        views = [self.view[offset : offset + size] for offset in offsets]
        if len(keys) == 1:
            assert self.store.get_into(keys[0], views[0]) == size
            return
        assert (self.store.get_into_each(keys, views) == size).all()

    def put(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        views = [self.view[offset : offset + size] for offset in offsets]
        if len(keys) == 1:
            assert self.store.put_from(keys[0], views[0]) is mk.PutResult.STORED
            return
        assert set(self.store.put_each(keys, views)) == {mk.PutResult.STORED}

    def get_pieces(self, key: str, offsets: Sequence[int], size: int) -> None:
        views = [self.view[offset : offset + size] for offset in offsets]
        assert self.store.get_into(key, *views) == size * len(offsets)

    def remove(self, keys: list[str]) -> None:
        assert self.store.remove_each(keys).all()

    def exists(self, keys: list[str]) -> bool:
        return bool(self.store.exists_each(keys).all())

    def close(self) -> None:
        self.store.close()


class Cluster:
    """Ours over tcp alone. Mooncake does not compare what it has read, so neither does this by
    default, although a `ClusterStore` does.
    """

    def __init__(self, url: str, memory: Memory, capacity: int = 0, verify: float = 0.0):
        self.directory = directory.connect(url)
        self.engine = mk.TransferEngine(transports=["tcp"])
        store = Store.create(capacity, namespace="bench") if capacity else None
        self.node = Node(store, self.engine, self.directory)
        namespace = None if store else "bench"
        self.cluster = ClusterStore(self.node, namespace=namespace, verify=verify)
        self.region = self.cluster.register(memory.bytes)
        self.view = memory.view

    def get(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        views = [self.view[offset : offset + size] for offset in offsets]
        if len(keys) == 1:
            assert self.cluster.get_into(keys[0], views[0]) == size
            return
        assert (self.cluster.get_into_each(keys, views) == size).all()

    def put(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        views = [self.view[offset : offset + size] for offset in offsets]
        if len(keys) == 1:
            assert self.cluster.put_from(keys[0], views[0]) is mk.PutResult.STORED
            return
        assert set(self.cluster.put_each(keys, views)) == {mk.PutResult.STORED}

    def remove(self, keys: list[str]) -> None:
        assert self.cluster.remove_each(keys).all()

    def close(self) -> None:
        self.cluster.close()
        self.engine.close()
        self.directory.close()


class Redis:
    """A plain value store, over a unix socket or tcp."""

    def __init__(self, url: str, memory: Memory):
        import redis

        self.client = redis.Redis.from_url(url)
        self.view = memory.view

    def get(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        for offset, value in zip(offsets, self.client.mget(keys), strict=True):
            self.view[offset : offset + size] = value

    def put(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        views = [self.view[offset : offset + size] for offset in offsets]
        assert self.client.mset(dict(zip(keys, views, strict=True)))

    def get_pieces(self, key: str, offsets: Sequence[int], size: int) -> None:
        value = memoryview(self.client.get(key))
        for i, offset in enumerate(offsets):
            self.view[offset : offset + size] = value[i * size : (i + 1) * size]

    def remove(self, keys: list[str]) -> None:
        assert self.client.delete(*keys) == len(keys)

    def exists(self, keys: list[str]) -> bool:
        return self.client.exists(*keys) == len(keys)

    def close(self) -> None:
        self.client.close()


class Stream:
    """A socket over which another process sends, or receives, that many bytes: no store at all."""

    def __init__(self, port: int, memory: Memory):
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.view = memory.view

    def get(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        self.socket.sendall(struct.pack("<qq", len(keys) * size, 0))
        for offset in offsets:
            _receive(self.socket, self.view[offset : offset + size])

    def put(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        self.socket.sendall(struct.pack("<qq", 0, len(keys) * size))
        for offset in offsets:
            self.socket.sendall(self.view[offset : offset + size])
        assert self.socket.recv(1) == b"."

    def remove(self, keys: list[str]) -> None:
        pass

    def close(self) -> None:
        self.socket.close()


def _receive(connection: socket.socket, view: memoryview) -> bool:
    while len(view):
        count = connection.recv_into(view)
        if count == 0:
            return False
        view = view[count:]
    return True


def serve_stream(pipe: Any) -> None:
    """The other end of `Stream`."""
    sent, received = memoryview(values()), memoryview(np.zeros(TOTAL, np.uint8))
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        connection, _ = listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = memoryview(bytearray(16))
        while _receive(connection, head):
            to_send, to_receive = struct.unpack("<qq", head)
            if to_send:
                connection.sendall(sent[:to_send])
            elif _receive(connection, received[:to_receive]):
                connection.sendall(b".")


def set_up_ours(path: str, memory: Memory) -> ByAddress:
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", SEGMENT, 16 << 20, "tcp", "", path) == 0
    return ByAddress(store, memory)


def set_up_native(path: str, memory: Memory) -> Native:
    make = Store.open if os.path.exists(path) else partial(Store.create, SEGMENT)
    return Native(make(path), memory)


def set_up_mooncake(master: str, segment: int, memory: Memory) -> ByAddress:
    from mooncake.store import MooncakeDistributedStore as Peer

    store = Peer()
    arguments = ("127.0.0.1", "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", master)
    if code := store.setup(*arguments):
        raise Missing(f"its setup returned {code}")
    return ByAddress(store, memory)


def fill(client: Any, memory: Memory) -> None:
    memory.bytes[:] = values()
    for size in SIZES.values():
        for i in range(TOTAL // size):
            client.put([key_of(size, i)], [i * size], size)
    client.put(SMALL_KEYS, [0] * len(SMALL_KEYS), SMALL)


def hold(pipe: Any, make: Any) -> None:
    """The holder process: put everything, and stay."""
    memory = Memory()
    client = make(memory)
    fill(client, memory)
    pipe.send(True)
    with contextlib.suppress(EOFError):
        pipe.recv()
    client.close()


@contextlib.contextmanager
def holder(target: Any, *arguments: Any) -> Iterator[Any]:
    """A process that runs it; yields the first thing it sends."""
    context = new_processes()
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
    process.start()
    theirs.close()
    try:
        if not ours.poll(WAIT_S):
            raise Missing("its holder did not start")
        try:
            first = ours.recv()
        except EOFError:
            raise Missing("its holder ended") from None
        yield first
    finally:
        ours.close()
        process.join(5)
        process.kill()


@contextlib.contextmanager
def running(command: list[str], port: int) -> Iterator[None]:
    """A server that listens on a port of this machine."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + WAIT_S
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > until:
                    raise Missing(f"{command[0]} does not answer") from None
                time.sleep(0.05)
        yield
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def mooncake_master() -> Iterator[str]:
    """Mooncake's master; yields its address."""
    try:
        import mooncake.store
    except ImportError as error:
        raise Missing(f"it cannot be imported: {error}") from None
    port, metrics = free_port(), free_port()
    binary = Path(mooncake.store.__file__).parent / "mooncake_master"
    command = [str(binary), f"--rpc_port={port}", "--rpc_address=127.0.0.1"]
    with running([*command, f"--metrics_port={metrics}"], port):
        yield f"127.0.0.1:{port}"


@contextlib.contextmanager
def redis_server() -> Iterator[tuple[str, str]]:
    """redis-server, in memory only; yields its URLs: by tcp, and by a unix socket."""
    if shutil.which("redis-server") is None:
        raise Missing("there is no redis-server")
    with tempfile.TemporaryDirectory() as folder:
        port, path = free_port(), f"{folder}/redis.sock"
        command = ["redis-server", "--bind", "127.0.0.1", "--port", str(port), "--save", ""]
        with running([*command, "--dir", folder, "--unixsocket", path], port):
            yield f"redis://127.0.0.1:{port}/0", f"unix://{path}"


# The makers of holders, for `hold`: functions that can be passed to another process.
def holder_of_ours(path: str) -> Any:
    return partial(set_up_ours, path)


def native_holder(path: str) -> Any:
    return partial(set_up_native, path)


def holder_of_mooncake(master: str) -> Any:
    return partial(set_up_mooncake, master, SEGMENT)


def holder_of_cluster(url: str) -> Any:
    return partial(Cluster, url, capacity=SEGMENT)
