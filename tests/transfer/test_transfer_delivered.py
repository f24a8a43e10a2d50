"""Which descriptors of a failed request have arrived: TransferError.delivered, against memory."""

import asyncio
import contextlib
import signal
import socket
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels import config
from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import BlockPool, TransferEngine

from .handshake import answer, receive_exactly
from .proxy import Proxy
from .support import (
    ACK,
    HEADER,
    RANGE,
    READ,
    UNTOUCHED,
    WAIT_S,
    WRITE,
    addressed,
    error_of,
    eventually,
    peer_process,
    raw_server,
    stall,
    untouched,
)

PIECE = 1 << 20  # of two lanes
SIZE = 8 * PIECE
BASE = 1 << 40  # of the raw peer's memory
FENCE = 12
REFUSAL = b"refused in the middle"


class Target:
    """A peer's memory, and what happens to each piece on its way there, by any connection.

    "take": it is moved, and confirmed; "refuse": neither; "lose": half of it is moved, and the
    connection ends; "die": the same, and no later one is served; "last": it is refused once six
    others are moved.
    """

    def __init__(self, memory: np.ndarray, plan):
        self._memory = memory
        self._plan = iter(plan)
        self._dead = False
        self._num_taken = 0
        self._taken = threading.Condition()
        self._threads: list[threading.Thread] = []

    def __call__(self, connection):
        thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
        thread.start()
        self._threads.append(thread)

    def join(self):
        for thread in self._threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()

    def _serve(self, connection):
        with contextlib.suppress(OSError, EOFError):
            if not self._dead:
                answer(connection)
                while self._frame(connection):
                    pass
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)

    def _frame(self, connection) -> bool:
        header = HEADER.unpack(receive_exactly(connection, HEADER.size))
        op, num_ranges, request_id, _, num_bytes = header
        table = receive_exactly(connection, num_ranges * RANGE.size)
        payload = b""
        if op == WRITE:
            receive_exactly(connection, -(HEADER.size + len(table)) % 64)
        if op in (WRITE, FENCE):
            payload = receive_exactly(connection, num_bytes)
        if op not in (WRITE, READ):
            connection.sendall(ACK.pack(0, 0, request_id, len(payload)))
            return True
        does = "die" if self._dead else next(self._plan, "take")
        if does == "last":
            with self._taken:
                assert self._taken.wait_for(lambda: self._num_taken == 6, WAIT_S)
        if does in ("refuse", "last"):
            connection.sendall(ACK.pack(1, len(REFUSAL), request_id, 0) + REFUSAL)
            return True
        self._dead |= does == "die"
        most = num_bytes if does == "take" else num_bytes // 2
        parts = [self._memory[at - BASE :][:size] for at, size in RANGE.iter_unpack(table)]
        if op == READ:
            data = b"".join(part.tobytes() for part in parts)[:most]
            connection.sendall(ACK.pack(0, 0, request_id, num_bytes) + data)
        else:
            self._write(parts, np.frombuffer(payload, np.uint8)[:most])
            if does == "take":
                connection.sendall(ACK.pack(0, 0, request_id, num_bytes))
        if does == "take":
            with self._taken:
                self._num_taken += 1
                self._taken.notify_all()
        return does == "take"

    @staticmethod
    def _write(parts, data):
        for part in parts:
            here = part[: len(data)]
            here[:] = data[: len(here)]
            data = data[len(here) :]


def arrived(source, target, sources, targets, sizes) -> np.ndarray:
    """Which blocks hold the new bytes: the loop."""
    rows = zip(sources, targets, sizes, strict=True)
    return np.array([(target[t : t + n] == source[s : s + n]).all() for s, t, n in rows])


def check(error: TransferError, there: np.ndarray, sizes) -> None:
    assert error.delivered.dtype == bool and error.delivered.shape == (len(sizes),)
    assert not (error.delivered & ~there).any()
    assert sizes[error.delivered].sum() <= error.num_bytes_done


@st.composite
def blocks(draw):
    """(near offsets, far offsets, sizes): in runs that are merged, or mirrored, so that none is."""
    pages = draw(st.lists(st.integers(1, 500), min_size=1, max_size=5))
    sizes = np.resize(np.array(pages) * 4096, SIZE // 4096)
    sizes = sizes[: np.searchsorted(np.cumsum(sizes), SIZE) + 1]
    near = np.cumsum(sizes) - sizes
    far = draw(st.sampled_from([near, sizes.sum() - near - sizes]))
    cuts = draw(st.lists(st.integers(0, len(sizes)), max_size=10))
    runs = np.split(np.arange(len(sizes)), sorted(cuts))
    order = np.concatenate(draw(st.permutations(runs)))
    return near[order], far[order], sizes[order]


def move(direction, lanes, plan, near, far, sizes) -> tuple[TransferError | None, np.ndarray]:
    """The request's error, and which blocks are there."""
    source, target = addressed(sizes.sum()), untouched(sizes.sum())
    ours, theirs = (source, target) if direction == "write" else (target, source)
    peers = Target(theirs, plan)
    error = None
    with config.override(transfer_lanes=lanes), raw_server(peers, join=peers.join) as name:
        with TransferEngine(transports=["tcp"]) as engine:
            region, peer = engine.register(ours), engine.open(name)
            call = getattr(engine, f"{direction}_blocks")
            try:
                call(peer, region.address + near, BASE + far, sizes).wait()
            except TransferError as caught:
                error = caught
    places = (near, far) if direction == "write" else (far, near)
    return error, arrived(source, target, *places, sizes)


@pytest.mark.parametrize("lanes", [1, 2])
@pytest.mark.parametrize("direction", ["write", "read"])
def test_blocks_marked_delivered_have_arrived(direction, lanes):
    """Of requests whose pieces are refused, lost and sent again, or whose peer dies."""
    step = st.sampled_from(["take", "take", "take", "take", "lose", "refuse", "die"])

    @given(plan=st.lists(step, max_size=12), where=blocks())
    @settings(max_examples=15, deadline=None)
    def run(plan, where):
        error, there = move(direction, lanes, plan, *where)
        if error:
            check(error, there, where[2])
        else:
            assert there.all()

    run()


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("merged", [True, False])
def test_delivered_blocks_need_not_be_a_prefix(direction, merged):
    """One lane's first piece is refused; the other lane has moved six, and knows of four."""
    sizes = np.full(SIZE // 4096, 4096)
    near = np.arange(len(sizes)) * 4096
    error, there = move(direction, 2, ["last"], near, near if merged else near[::-1], sizes)
    assert error.cause == REFUSAL.decode()
    check(error, there, sizes)
    by_piece = error.delivered.reshape(8, -1)
    assert (by_piece.all(axis=1) == by_piece.any(axis=1)).all()
    assert 4 <= by_piece.all(axis=1).sum() <= 6
    assert error.num_bytes_done == error.delivered.sum() * 4096


def test_delivered_is_exact_when_peer_is_killed_during_read():
    size, block = 64 << 20, 1 << 14
    with (
        config.override(transfer_lanes=2),
        TransferEngine(transports=["tcp"]) as engine,
        peer_process(size) as other,
    ):
        source, target = addressed(size), untouched(size)
        ours, into, peer = engine.register(source), engine.register(target), engine.open(other.name)
        engine.write(peer, [(ours.address, other.address, size)]).wait()
        offsets = np.random.default_rng(0).permutation(size // block) * block
        ticket = engine.read_blocks(peer, into.address + offsets, other.address + offsets, block)
        eventually(lambda: (target[::block] != UNTOUCHED).any())
        other.signal(signal.SIGKILL)
        sizes = np.full(len(offsets), block)
        try:
            ticket.wait()
        except TransferError as error:
            check(error, arrived(source, target, offsets, offsets, sizes), sizes)
        else:
            assert (target == source).all()


@pytest.mark.parametrize("direction", ["write", "read"])
def test_delivered_is_exact_when_peer_closes_its_region(direction):
    part, block = 16 << 20, 1 << 14
    source, target = addressed(4 * part), untouched(4 * part)
    near, far = (source, target) if direction == "write" else (target, source)
    with (
        config.override(transfer_lanes=2),
        TransferEngine() as there,
        Proxy(there.name, limit=part) as proxy,
        TransferEngine(transports=["tcp"]) as here,
    ):
        ours, peer = here.register(near), here.open(proxy.name)
        theirs = [there.register(far[i : i + part]) for i in range(0, 4 * part, part)]
        offsets = np.arange(0, 4 * part, block)
        call = getattr(here, f"{direction}_blocks")
        ticket = call(peer, ours.address + offsets, theirs[0].address + offsets, block)
        eventually(lambda: any(has_passed(relay, part) for relay in proxy.relays))
        theirs[3].close()
        proxy.limit = None
        for relay in list(proxy.relays):
            relay.up.release()
            relay.down.release()
        with pytest.raises(TransferError, match="not inside a registered region") as caught:
            ticket.wait()
        sizes = np.full(len(offsets), block)
        check(caught.value, arrived(source, target, offsets, offsets, sizes), sizes)
        assert caught.value.delivered.any()
        assert not caught.value.delivered[-part // block :].any()


def has_passed(relay, num_bytes: int) -> bool:
    """Whether either direction has come to its limit."""
    return num_bytes in (len(relay.up.passed), len(relay.down.passed))


@pytest.mark.parametrize("checksum", [False, True])
def test_data_delivered_without_its_notification(pair, checksum):
    """An item for each block of each plane; none, if there is nothing but a notification."""
    near, far = pair.regions(addressed(4096), untouched(4096))
    ours, theirs = (
        BlockPool([region.address, region.address + 2048], 8, 256) for region in (near, far)
    )
    pair.far.refuse_notifications()
    error = error_of(
        pair.near.write_blocks(
            pair.peer,
            ours.blocks([1, 2, 5]),
            theirs.blocks([1, 2, 3]),
            notify=b"no",
            checksum=checksum,
        )
    )
    assert error.only_notification_missing
    assert error.delivered.tolist() == [True] * 6
    refused = error_of(pair.near.write(pair.peer, [(near.address, far.address + 4096, 8)]))
    assert refused.delivered.tolist() == [False]


def test_bare_notification_has_no_delivered_mask(pair):
    pair.far.refuse_notifications()
    error = error_of(pair.near.write(pair.peer, [], notify=b"no"))
    assert error.delivered is None and not error.only_notification_missing


def test_cancelled_request_delivered_nothing():
    with raw_server(stall) as name, TransferEngine(transports=["tcp"]) as engine:
        region, peer = engine.register(addressed(4096)), engine.open(name)
        ticket = engine.write(peer, [(region.address, 1, 8), (region.address, 9, 8)])
        assert ticket.cancel()
        error = error_of(ticket)
        assert error.delivered.tolist() == [False, False]


def test_awaited_error_carries_delivered():
    async def run(ticket):
        await ticket

    with raw_server(stall) as name, TransferEngine(transports=["tcp"]) as engine:
        region, peer = engine.register(addressed(4096)), engine.open(name)
        ticket = engine.write(peer, [(region.address, 1, 8)], deadline_s=0.1)
        with pytest.raises(TransferError) as caught:
            asyncio.run(run(ticket))
        assert caught.value.delivered.tolist() == [False]
