"""Adjacent descriptors are moved as one; the caller does not notice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine

from .handshake import answer, receive_exactly
from .support import ACK, HEADER, RANGE, UNTOUCHED, WRITE, addressed, raw_server, untouched

SIZE = 1 << 16
BORDER = SIZE - 64  # of two regions


class Tables:
    """A peer that confirms every write, and keeps what the tables said."""

    def __init__(self):
        self.ranges = []

    def __call__(self, connection):
        answer(connection)
        while True:
            header = HEADER.unpack(receive_exactly(connection, HEADER.size))
            op, num_ranges, request_id, _, num_bytes = header
            table = receive_exactly(connection, num_ranges * RANGE.size)
            self.ranges += RANGE.iter_unpack(table)
            payload = num_bytes if op == WRITE else 0
            zeros = -(HEADER.size + len(table)) % 64 if op == WRITE else 0
            receive_exactly(connection, zeros + payload)
            connection.sendall(ACK.pack(0, 0, request_id, payload))


@pytest.fixture
def asked():
    """A function that writes offsets, and returns the (offset, bytes) that the peer was sent."""
    tables = Tables()
    with raw_server(tables) as name, TransferEngine(transports=["tcp"]) as engine:
        memory, peer = addressed(SIZE), engine.open(name)
        region, _ = engine.register(memory[:BORDER]), engine.register(memory[BORDER:])
        base = region.address + (1 << 40)  # of a memory that the peer does not have

        def ask(local, remote, sizes):
            tables.ranges.clear()
            local, remote = region.address + np.array(local), base + np.array(remote)
            engine.write_blocks(peer, local, remote, sizes).wait()
            return [(address - base, num_bytes) for address, num_bytes in tables.ranges]

        yield ask


def test_adjacent_descriptors_are_merged_on_the_wire(asked):
    assert asked([0, 10, 20], [0, 10, 20], 10) == [(0, 30)]
    assert asked([0, 10, 21], [0, 10, 20], 10) == [(0, 20), (20, 10)]
    assert asked([0, 10, 20], [0, 10, 21], 10) == [(0, 20), (21, 10)]
    assert asked([0, 20, 30, 60, 70, 80], [5, 25, 35, 70, 80, 90], [20, 10, 9, 10, 10, 1]) == [
        (5, 39),
        (70, 21),
    ]
    assert asked([20, 10, 0], [20, 10, 0], 10) == [(20, 10), (10, 10), (0, 10)]  # not in order
    assert asked([7], [9], 3) == [(9, 3)]
    across = [BORDER - 20, BORDER - 10, BORDER, BORDER + 10]  # a work request has one key
    assert asked(across, across, 10) == [(BORDER - 20, 20), (BORDER, 20)]
    count = 10_000  # more than a table holds
    assert asked(np.arange(count) * 4, np.arange(count) * 4, 4) == [(0, 4 * count)]


def merged(rows):
    """The loop."""
    runs = []
    for local, remote, size in rows:
        if runs and (local, remote) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1][2] += size
        else:
            runs.append([local, remote, size])
    return [(remote, size) for _, remote, size in runs]


@st.composite
def runs(draw):
    """Descriptors of which some continue the one before, at one end or at both."""
    rows, local, remote = [], 0, 0
    for _ in range(draw(st.integers(1, 30))):
        local += draw(st.sampled_from([0, 0, 1]))
        remote += draw(st.sampled_from([0, 0, 1]))
        size = draw(st.sampled_from([8, 8, 8, 3]))
        rows.append((local, remote, size))
        local, remote = local + size, remote + size
    return rows


def test_any_runs(asked):
    @given(rows=runs())
    @settings(max_examples=80, deadline=None)
    def run(rows):
        assert asked(*map(list, zip(*rows, strict=True))) == merged(rows)

    run()


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("order", ["ascending", "last_first"])
@pytest.mark.parametrize("count", [3, 100, 20_000])
def test_neighbours_in_many_regions(pair, direction, order, count):
    """What is merged here may be of two regions there, or of two here."""
    size = 16
    source, target = addressed(count * size), untouched(count * size)
    near, far = (source, target) if direction == "write" else (target, source)
    cut_near, cut_far = 17 * size % near.nbytes, (count - 1) * size
    here = [pair.near.register(part) for part in (near[:cut_near], near[cut_near:])]
    there = [pair.far.register(part) for part in (far[:cut_far], far[cut_far:])]
    offsets = np.arange(count) * size
    if order == "last_first":
        offsets = np.roll(offsets, 1)
    call = getattr(pair.near, f"{direction}_blocks")
    for sizes in (size, np.full(count, size)):
        target[:] = UNTOUCHED
        call(pair.peer, here[0].address + offsets, there[0].address + offsets, sizes).wait()
        np.testing.assert_array_equal(target, source)
    for region in (*here, *there):
        region.close()


@pytest.mark.parametrize("direction", ["write", "read"])
@pytest.mark.parametrize("count", [4, 20_000])
@pytest.mark.parametrize("uneven", [False, True])
def test_a_refusal_names_the_caller_s_descriptor(pair, direction, count, uneven):
    size = 16
    near, far = pair.regions(addressed(2 * count * size), untouched((count - 1) * size))
    sizes = np.full(count, size)
    if uneven:
        sizes[0] -= 1
    offsets = np.cumsum(sizes) - sizes
    call = getattr(pair.near, f"{direction}_blocks")
    address = far.address + offsets[-1]
    message = rf"descriptors\[{count - 1}\] remote range {address:#x} \+ 16 bytes is not inside"
    with pytest.raises(TransferError, match=message) as caught:
        call(
            pair.peer, near.address + offsets, far.address + offsets, sizes, notify=b"never"
        ).wait()
    assert caught.value.num_bytes_done == 0
    assert caught.value.num_bytes_total == sizes.sum()
    assert (far._buffer.owner == UNTOUCHED).all()
    pair.near.write(pair.peer, [], notify=b"next").wait()
    assert pair.far.receive_notifications() == [(pair.near.name, b"next")]
    call(pair.peer, near.address + offsets[:-1], far.address + offsets[:-1], sizes[:-1]).wait()


def test_overlapping_local_chain_is_copied_in_order():
    """Over ``local``: merged, the second would not see what the first has written."""
    with TransferEngine() as engine, engine.open(engine.name) as itself:
        region = engine.register(memory := addressed(4096))
        expected = memory.copy()
        expected[:2048] = np.tile(expected[:64], 32)
        offsets = region.address + np.arange(31) * 64
        engine.write_blocks(itself, offsets, offsets + 64, 64).wait()
        np.testing.assert_array_equal(memory, expected)
