"""This project's store, Mooncake's, Redis, memcpy and a raw stream, in turn.

Values of one size, 16 MiB of them, are copied into registered memory and put from there, with the
batched call where there are several, or in a row of calls ("64 calls"), of which only the first
finds what the others have left in the caches. Each moves values that the last one has not touched;
all of them have been read once before. "in process": the client's own process has put them. "other
process": another process of this host has, and Mooncake's are in its segment; ours is the API that
it has in common with Mooncake, and in the rows "Store" this project's own. "tcp": between two
processes, with no transport but tcp, and for ours a directory in Redis; the client has no pool of
its own. "checked": ours that compares what it has read with its checksum. Redis runs behind a unix
socket, in the rows "tcp" behind tcp, LMCache's server behind tcp. GB/s counts the bytes moved,
once; small values are moved 512 at a time. Peers that are not installed are left out (`pip install
--no-deps mooncake-transfer-engine-non-cuda`; lmcache_side.py).
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

from baselines import store as base
from baselines.lmcache import LMCache, LMCacheServer, lmcache_server
from baselines.store import SIZES, SMALL, SMALL_KEYS, TOTAL, Memory, Missing, key_of
from lib.harness import Case, LeftOut, arguments
from lib.interleave import Interleave
from lib.table import report
from mooncake_kernels.errors import Unavailable

# Value size, values a call, calls in a row.
MOVES = [("64 KiB", 1, 1), ("64 KiB", 16, 1), ("64 KiB", 1, 64), ("1 MiB", 1, 1), ("16 MiB", 1, 1)]
PIECE = 16 << 10
NUM_PIECES = 64
SERVER_MEMORY = 64 << 20  # of LMCache's client, for values on their way


class Memcpy:
    """numpy's copies between the memory and shared memory like a pool's."""

    def __init__(self, memory: Memory):
        self.memory = memory.bytes
        self.shared = base.mk.shared_memory(TOTAL).numpy()
        self.shared[:] = base.values()
        self.target = base.mk.shared_memory(TOTAL).numpy()
        self.target[:] = 0

    def get(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        for offset in offsets:
            np.copyto(self.memory[offset : offset + size], self.shared[offset : offset + size])

    def put(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        for offset in offsets:
            np.copyto(self.target[offset : offset + size], self.memory[offset : offset + size])

    def remove(self, keys: list[str]) -> None:
        pass


class OneByOne:
    """A store's calls for one value, in a row."""

    def __init__(self, client: Any):
        self.client = client

    def get(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        for key, offset in zip(keys, offsets, strict=True):
            self.client.get([key], [offset], size)

    def put(self, keys: list[str], offsets: Sequence[int], size: int) -> None:
        for key, offset in zip(keys, offsets, strict=True):
            self.client.put([key], [offset], size)

    def remove(self, keys: list[str]) -> None:
        for key in keys:
            self.client.remove([key])


class Side:
    """One store, whose values are moved in turn: each turn those after the last one's."""

    def __init__(self, client: Any, size: int, each: int, in_a_row: int):
        self.client = OneByOne(client) if in_a_row > 1 else client
        self.size = size
        self.order = Interleave(TOTAL // size, each * in_a_row)
        self.taken = self.order.parts[0]

    def get(self) -> None:
        self._take()
        self.client.get([key_of(self.size, i) for i in self.taken], self._offsets(), self.size)

    def put(self) -> None:
        self._take()
        self.put_back()

    def remove(self) -> None:
        self._take()
        self.remove_again()

    def put_back(self) -> None:
        self.client.put(self._keys(), self._offsets(), self.size)

    def remove_again(self) -> None:
        self.client.remove(self._keys())

    def skip_half(self) -> None:
        for _ in range(len(self.order.parts) // 2):
            self._take()

    def _take(self) -> None:
        self.taken = self.order.take()

    def _keys(self) -> list[str]:
        return [f"put/{self.size}/{i}" for i in self.taken]

    def _offsets(self) -> list[int]:
        return [i * self.size for i in self.taken]


def moving(
    title: str, clients: dict[str, Any], memory: Memory, name: str, each: int, in_a_row: int
) -> Iterator[Case]:
    size = SIZES[name]
    expected = base.values()
    putting = {kind: client for kind, client in clients.items() if kind != "checked"}
    stores = {kind: client for kind, client in putting.items() if kind not in ("memcpy", "stream")}
    removing = {kind: client for kind, client in stores.items() if getattr(client, "removes", True)}

    def case(verb: str, undo: str, check: Callable[[], None], clients: dict[str, Any]) -> Case:
        opened = {kind: Side(client, size, each, in_a_row) for kind, client in clients.items()}
        if "checked" in opened:
            opened["checked"].skip_half()  # else it reads what ours has just moved into the caches
        calls = {kind: getattr(side, verb) for kind, side in opened.items()}
        undoing = {kind: getattr(side, undo) for kind, side in opened.items()} if undo else {}
        call = {"get": "get_into", "put": "put_from"}.get(verb, verb)
        num_bytes = None if verb == "remove" else each * in_a_row * size
        moved = f"{in_a_row} calls of {name}" if in_a_row > 1 else f"{each} x {name}"
        title_of = f"{title}, {call}: {moved}"
        return Case(title_of, calls.pop("ours"), calls, check, num_bytes, undo=undoing)

    def check_gets() -> None:
        indices = range(TOTAL // size)
        for client in clients.values():
            memory.bytes[:] = 0
            client.get([key_of(size, i) for i in indices], [i * size for i in indices], size)
            assert np.array_equal(memory.bytes, expected), "wrong: not timed"

    def check_puts() -> None:
        for client in stores.values():
            memory.bytes[:] = expected
            client.put(["check"], [0], size)
            memory.bytes[:] = 0
            client.get(["check"], [0], size)
            assert np.array_equal(memory.bytes[:size], expected[:size]), "wrong: not timed"
            client.remove(["check"])

    def put_all() -> None:
        for client in stores.values():
            for part in Interleave(TOTAL // size, each).parts:
                client.put([f"put/{size}/{i}" for i in part], [i * size for i in part], size)

    yield case("get", "", check_gets, clients)
    yield case("put", "remove_again", check_puts, putting)
    yield case("remove", "put_back", put_all, removing)
    for client in stores.values():
        client.remove([f"put/{size}/{i}" for i in range(TOTAL // size)])


def pieces(clients: dict[str, Any], memory: Memory) -> Iterator[Case]:
    size = PIECE * NUM_PIECES
    offsets = [(i * 2 * PIECE) for i in range(NUM_PIECES)]
    expected = base.values().reshape(-1, PIECE)

    def get(client: Any, parts: Interleave) -> None:
        [i] = parts.take()
        client.get_pieces(key_of(size, i), offsets, PIECE)

    def check() -> None:
        for client in clients.values():
            memory.bytes[:] = 0
            client.get_pieces(key_of(size, 0), offsets, PIECE)
            found = memory.bytes.reshape(-1, PIECE)[: 2 * NUM_PIECES : 2]
            assert np.array_equal(found, expected[:NUM_PIECES]), "wrong: not timed"

    timed = {
        kind: partial(get, client, Interleave(TOTAL // size)) for kind, client in clients.items()
    }
    yield Case("other process, 64 buffers of 16 KiB", timed.pop("ours"), timed, check, size)


def small_values(title: str, clients: dict[str, Any], memory: Memory) -> Iterator[Case]:
    """Many small values a call: how many operations a second each store does."""
    clients = {kind: side for kind, side in clients.items() if getattr(side, "moves_small", True)}
    count = len(SMALL_KEYS)
    offsets = [i * SMALL for i in range(count)]
    new = [f"put/{key}" for key in SMALL_KEYS]
    stores = {kind: client for kind, client in clients.items() if getattr(client, "removes", True)}

    def check() -> None:
        for client in stores.values():
            memory.bytes[:] = base.values()
            client.put(["check"], offsets[-1:], SMALL)
            memory.bytes[:] = 0
            client.get(["check"], [0], SMALL)
            assert np.array_equal(memory.bytes[:SMALL], base.values()[offsets[-1] :][:SMALL])
            client.remove(["check"])

    def put_all() -> None:
        check()
        for client in stores.values():
            client.put(new, offsets, SMALL)

    def case(name: str, clients: dict[str, Any], check: Callable[[], None], **calls: Any) -> Case:
        by_verb = {
            verb: {kind: partial(getattr(client, verb), *given) for kind, client in clients.items()}
            for verb, given in calls.items()
        }
        timed, undo = [*by_verb.values(), {}][:2]
        return Case(f"{title}, {name}", timed.pop("ours"), timed, check, undo=undo)

    put, moved = (new, offsets, SMALL), f"{count} x {SMALL} B"
    yield case(f"get_into: {moved}", clients, check, get=(SMALL_KEYS, offsets, SMALL))
    yield case(f"put_from: {moved}", stores, check, put=put, remove=(new,))
    yield case(f"remove: {moved}", stores, put_all, remove=(new,), put=put)
    for client in stores.values():
        client.remove(new)


def small_keys(clients: dict[str, Any]) -> Iterator[Case]:
    def check() -> None:
        for client in clients.values():
            assert client.exists(SMALL_KEYS), "wrong: not timed"
            assert not client.exists(["none"]), "wrong: not timed"

    timed = {kind: partial(client.exists, SMALL_KEYS) for kind, client in clients.items()}
    yield Case(f"other process, exists: {len(SMALL_KEYS)} keys", timed.pop("ours"), timed, check)


class Peers:
    """The clients of one part of the bench; missing ones are reported once."""

    def __init__(self, opened: contextlib.ExitStack, left_out: dict[str, str]):
        self.opened = opened
        self.left_out = left_out
        self.clients: dict[str, Any] = {}

    def add(self, name: str, make: Callable[[], Any]) -> None:
        try:
            client = make()
        except (Missing, ImportError, Unavailable) as why:
            self.left_out[name] = str(why)
            return
        if hasattr(client, "close"):
            self.opened.callback(client.close)
        self.clients[name] = client


class Makers:
    """What makes the clients of one part, and the servers and holders that they need."""

    def __init__(self, enter: Callable[[Any], Any], memory: Memory, path: str):
        self.enter = enter
        self.memory = memory
        self.path = path

    def filled(self, client: Any) -> Any:
        base.fill(client, self.memory)
        return client

    def ours(self) -> Any:
        self.enter(base.holder(base.hold, base.holder_of_ours(self.path)))
        return base.set_up_ours(self.path, self.memory)

    def native(self) -> Any:
        self.enter(base.holder(base.hold, base.native_holder(self.path)))
        return base.set_up_native(self.path, self.memory)

    def mooncake(self) -> Any:
        master = self.enter(base.mooncake_master())
        self.enter(base.holder(base.hold, base.holder_of_mooncake(master)))
        return base.set_up_mooncake(master, 0, self.memory)

    def redis(self, is_tcp: bool = False) -> Any:
        by_tcp, by_socket = self.enter(base.redis_server())
        return self.filled(base.Redis(by_tcp if is_tcp else by_socket, self.memory))

    def lmcache_server(self) -> Any:
        port = self.enter(lmcache_server())
        return self.filled(LMCacheServer(SERVER_MEMORY, self.memory, port))


def in_process(peers: Peers, make: Makers) -> None:
    def mooncake() -> Any:
        return base.set_up_mooncake(make.enter(base.mooncake_master()), 256 << 20, make.memory)

    peers.add("ours", lambda: make.filled(base.set_up_ours(make.path, make.memory)))
    peers.add("mooncake", lambda: make.filled(mooncake()))
    peers.add("lmcache", lambda: make.filled(LMCache(256 << 20, make.memory)))
    peers.add("memcpy", lambda: Memcpy(make.memory))


def other_process(peers: Peers, make: Makers) -> None:
    peers.add("ours", make.ours)
    peers.add("mooncake", make.mooncake)
    peers.add("redis", make.redis)
    peers.add("lmcache server", make.lmcache_server)
    peers.add("memcpy", lambda: Memcpy(make.memory))


def by_store(peers: Peers, make: Makers) -> None:
    peers.add("ours", make.native)
    peers.add("mooncake", make.mooncake)
    peers.add("redis", make.redis)
    peers.add("memcpy", lambda: Memcpy(make.memory))


def over_tcp(peers: Peers, make: Makers) -> None:
    url, _ = make.enter(base.redis_server())
    make.enter(base.holder(base.hold, base.holder_of_cluster(url)))
    peers.add("ours", lambda: base.Cluster(url, make.memory))
    peers.add("checked", lambda: base.Cluster(url, make.memory, verify=1.0))
    peers.add("mooncake", make.mooncake)
    peers.add("redis", lambda: make.redis(is_tcp=True))
    peers.add("lmcache server", make.lmcache_server)
    peers.add(
        "stream",
        lambda: base.Stream(make.enter(base.holder(base.serve_stream)), make.memory),
    )


def cases(quick: bool) -> Iterator[Case | LeftOut]:
    left_out: dict[str, str] = {}
    sizes = MOVES[: 3 if quick else None]
    for title, prepare in (
        ("in process", in_process),
        ("other process", other_process),
        ("Store, other process", by_store),
        ("tcp", over_tcp),
    ):
        memory = Memory()
        path = f"/dev/shm/mk-bench-{os.getpid()}-{title.replace(', ', '-').replace(' ', '-')}"
        with contextlib.ExitStack() as opened:
            opened.callback(lambda path=path: os.path.exists(path) and os.remove(path))
            peers = Peers(opened, left_out)
            prepare(peers, Makers(opened.enter_context, memory, path))
            if "ours" not in peers.clients:
                continue
            for name, each, in_a_row in sizes:
                yield from moving(title, peers.clients, memory, name, each, in_a_row)
            for other in ("memcpy", "stream", "checked"):
                peers.clients.pop(other, None)
            yield from small_values(title, peers.clients, memory)
            if title == "other process":
                yield from pieces(peers.clients, memory)
                yield from small_keys(peers.clients)
    for name, why in left_out.items():
        yield LeftOut(name, why)


if __name__ == "__main__":
    options = arguments(__doc__, without=("device",))
    report("store_peers", cases(options.quick), options)
