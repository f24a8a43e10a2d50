"""write(), read() and immediates, against a model of the bytes on both sides."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels import InvalidArgument, TransferError

from .pairs import Connection

SIZE = 1 << 14
RANGE = st.tuples(st.integers(0, SIZE), st.integers(0, SIZE), st.integers(0, 3000)).map(
    lambda r: (r[0], r[1], min(r[2], SIZE - max(r[0], r[1])))
)


@st.composite
def range_lists(draw):
    """Ranges anywhere, some of which continue the one before on one side or both."""
    ranges = []
    for here, there, size in draw(st.lists(RANGE, max_size=20)):
        if ranges and draw(st.booleans()):
            last = ranges[-1]
            there = min(last[1] + last[2], SIZE)
            here = min(last[0] + last[2], SIZE) if draw(st.booleans()) else here
            size = min(size, SIZE - max(here, there))
        ranges.append((here, there, size))
    return ranges


@given(
    transfers=st.lists(st.tuples(st.booleans(), range_lists()), min_size=1, max_size=6),
    max_sges=st.integers(1, 4),
    max_sends=st.integers(1, 8),
    piece=st.sampled_from([0, 4096, 8192]),
    held=st.booleans(),
)
@settings(max_examples=150)
def test_any_ranges(world, transfers, max_sges, max_sends, piece, held):
    """Several transfers in flight at once, of more requests than the queue pair has room for."""
    sizes = {"max_sges": max_sges, "max_sends": max_sends, "piece": piece, "size": SIZE}
    with Connection(world, depth=max_sends, **sizes) as c:
        tokens = {}
        with world.held() as let:
            if not held:
                let(-1)
            for reads, ranges in transfers:
                tokens[c.submit(reads, ranges)] = sum(size for _, _, size in ranges)
                c.expect(reads, ranges)
        ended = {e.token: e for e in c.near.drain()}
        assert list(ended) == list(tokens)  # each once, in their order
        assert all(e.ok and e.num_bytes == tokens[e.token] for e in ended.values())
        c.check_bytes()
        assert c.near.queue.poll() == []
    world.check()


def test_adjacent_ranges_share_a_work_request(world, connection):
    ranges = [(512 * (7 - i), 512 * i, 512) for i in range(8)]  # there in order, here backwards
    before = world.calls("ibv_post_send")
    token = connection.write(ranges)
    connection.near.queue.wait(token)
    assert world.calls("ibv_post_send") - before == 1  # of 8 parts, as many as the NIC gathers
    connection.near.queue.wait(connection.read(ranges))
    assert world.calls("ibv_post_send") - before == 3  # it scatters 4


def test_contiguous_ranges_are_one_part(world, connection):
    before = world.calls("ibv_post_send")
    ranges = [(64 * i, 64 * i, 64) for i in range(1000)]
    connection.near.queue.wait(connection.write(ranges))
    assert world.calls("ibv_post_send") - before == 1
    connection.expect(False, ranges)
    connection.check_bytes()


def test_messages_respect_the_port_limit(world):
    world.set_port(0, max_msg_sz=1000)
    with Connection(world) as c:
        c.near.queue.wait(c.write([(0, 0, 4500)]))
        c.expect(False, [(0, 0, 4500)])
        c.check_bytes()
        assert world.calls("ibv_post_send") == 5


def test_port_without_a_message_limit(world):
    world.set_port(0, max_msg_sz=0)
    with Connection(world) as c:
        token = c.write([(0, 0, 100)])
        assert [e.token for e in c.near.drain()] == [token]


def test_immediate_arrives_after_the_data(world):
    with Connection(world, max_immediates=4) as c:
        token = c.write([(0, 0, 5000), (9000, 100, 7), (100, 9000, 2000)], immediate=0xFFFFFFFE)
        [told] = c.far.queue.poll(timeout_s=5)
        assert (told.immediate, told.token, told.ok) == (0xFFFFFFFE, None, True)
        assert told.num_bytes == 2000  # of the request that brought it
        assert told.qp_num == c.far.pair.number
        c.expect(False, [(0, 0, 5000), (9000, 100, 7), (100, 9000, 2000)])
        c.check_bytes()
        done = c.near.queue.wait(token)
        assert done.num_bytes == 7007 and done.immediate is None


def test_immediate_without_data(world):
    with Connection(world, max_immediates=1) as c:
        c.near.queue.wait(c.write([], immediate=7))
        [told] = c.far.queue.poll()
        assert told.immediate == 7 and told.num_bytes == 0


def test_immediates_wait_for_receive_slots(world):
    with Connection(world, max_immediates=2, max_sends=4) as c:
        tokens = [c.write([(0, 0, 8)], immediate=i) for i in range(9)]
        assert len(c.near.drain()) == 2
        got, ended = [], []
        while len(got) < 9:
            got += [e.immediate for e in c.far.drain()]
            ended += c.near.drain()
        assert got == list(range(9))
        assert [e.token for e in ended] == tokens[2:]


def test_immediate_without_receive_slot_exhausts_retries(world):
    with Connection(world) as c:
        c.connect(rnr_retries=3)
        token = c.write([(0, 0, 8)], immediate=1)
        with pytest.raises(TransferError, match="RNR retry counter exceeded"):
            c.near.queue.wait(token)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ranges": [(0, 0, 8), (0, 1 << 16, 1)]}, r"write: remote\[1\] must be within .* 65536"),
        ({"ranges": [((1 << 16) - 1, 0, 2)]}, r"write: local\[0\] must be within .* offset 65535"),
        ({"ranges": [(-8, 0, 4)]}, r"local\[0\] must be within .* got 4 bytes at offset -8"),
        ({"ranges": [(0, 0, 1 << 63)]}, r"local\[0\] must be within"),
        ({"immediate": 1 << 32}, "immediate must be an integer in 0 to 4294967295"),
        ({"immediate": -1}, "immediate must be an integer in 0 to 4294967295"),
    ],
)
def test_error_names_bad_argument(connection, change, message):
    good = {"ranges": [(0, 0, 8)], "immediate": None}
    with pytest.raises(InvalidArgument, match=message):
        connection.write(**(good | change))
    assert connection.near.drain() == []


@pytest.mark.parametrize(
    "ranges", [[(1, 2)] * 3, [1, 2, 3], [(1, 2, -3)], [(1, 2, "three")], 5, [(1.5, 2, 3)]]
)
def test_ranges_must_be_triples_of_integers(connection, ranges):
    near, far = connection.near, connection.far
    with pytest.raises(InvalidArgument, match="ranges must be"):
        near.pair.write(near.region, far.region.remote, ranges)


def test_rights(connection):
    near, far = connection.near, connection.far
    with far.device.register(bytearray(64), "remote_read") as readable:
        with pytest.raises(InvalidArgument, match="write: remote must be registered with remote_w"):
            near.pair.write(near.region, readable.remote, [])
    with near.device.register(bytes(64)) as constant:
        with pytest.raises(InvalidArgument, match="read: region must be registered for local wri"):
            near.pair.read(constant, far.region.remote, [])
    with pytest.raises(InvalidArgument, match="region must be registered on fake0, got one on f"):
        near.pair.write(far.region, far.region.remote, [])
    near.region.close()
    with pytest.raises(InvalidArgument, match="region of 65536 bytes on fake0 must be open"):
        connection.write([])
