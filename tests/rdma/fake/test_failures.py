"""Transfers that fail: what they deliver, and that each ends once."""

import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mooncake_kernels import InvalidArgument, TransferError

from .pairs import Connection

FLUSHED = "Work Request Flushed Error"


def scattered(count: int) -> list[tuple[int, int, int]]:
    """Ranges that neither side can join: a request each."""
    return [(1000 * i, 900 * i, 100 + i) for i in range(count)]


def delivered(count: int) -> int:
    return sum(size for _, _, size in scattered(count))


@pytest.mark.parametrize("max_sends", [1, 3, 4, 64])
@pytest.mark.parametrize("at", [0, 1, 5, 9])
def test_failed_work_flushes_later_transfers(world, max_sends, at):
    with Connection(world, max_sends=max_sends) as c:
        world.fail_work("remote access error", skip=at)
        with world.held():
            first, *later = [c.write(scattered(10)) for _ in range(4)]
        ended = {e.token: e for e in c.near.drain()}
        assert len(ended) == 4
        assert ended[first].status == "remote access error"
        assert ended[first].num_bytes == delivered(at)
        assert ended[first].vendor_error == 0x8A
        for token in later:
            assert (ended[token].status, ended[token].num_bytes) == (FLUSHED, 0)
        assert not c.near.pair.connected
        c.expect(False, scattered(at))
        c.check_bytes()
        after = c.write(scattered(2))
        [refused] = c.near.drain()
        assert (refused.token, refused.status) == (after, FLUSHED)


def test_failure_disconnects_the_remote_end(world):
    """Its receives are flushed; nothing of it is told, but that it is not connected any more."""
    with Connection(world, max_immediates=3) as c:
        world.fail_work("remote access error")
        c.write([(0, 0, 8)])
        assert c.far.queue.poll() == []
        assert not c.far.pair.connected


def test_write_to_a_closed_region_counts_no_bytes(connection):
    remote = connection.far.region.remote
    connection.far.region.close()
    near = connection.near
    token = near.pair.write(near.region, remote, [(near.region.address, remote.address, 8)])
    with pytest.raises(TransferError, match="remote access error") as caught:
        near.queue.wait(token)
    assert caught.value.num_bytes_done == 0


def test_local_region_closed_in_flight_fails_the_write(world, connection):
    with world.held():
        connection.write([(0, 0, 8)])
        connection.near.region.close()
    [failed] = connection.near.drain()
    assert failed.status == "local protection error" and failed.num_bytes == 0


@given(
    transfers=st.lists(st.integers(0, 6), min_size=1, max_size=8),
    steps=st.lists(st.integers(0, 4), max_size=12),
    failing=st.integers(0, 20),
    max_sends=st.integers(1, 8),
    how=st.lists(st.sampled_from(["work", "post"]), max_size=2),
    again=st.booleans(),
)
@settings(max_examples=200)
def test_each_transfer_completes_exactly_once(
    world, transfers, steps, failing, max_sends, how, again
):
    """Whatever fails and whenever it is polled: no completion is lost, and none comes twice.

    What is said to be delivered is; more may have been of the transfer that failed.
    """
    world.reset_rules()
    with Connection(world, depth=max_sends, max_sends=max_sends) as c:
        if "work" in how:
            world.fail_work("remote access error", failing)
        if "post" in how:
            world.fail("ibv_post_send", errno.ENOMEM, skip=(7 * failing) % 20)
        tokens, ended = {}, []
        with world.held() as let:
            for i, count in enumerate(transfers):
                tokens[c.write(scattered(count))] = count
                if i < len(steps):
                    let(steps[i])
                    ended += c.near.queue.poll()
            let(-1)
            ended += c.near.drain()
        assert sorted(e.token for e in ended) == sorted(tokens)
        num_done, is_failed = 0, False
        for end in sorted(ended, key=lambda e: e.token):
            assert not (end.ok and is_failed)
            is_failed |= not end.ok
            if end.ok:
                assert end.num_bytes == delivered(tokens[end.token])
            num_done = max(num_done, end.num_bytes)
        written = [size for _, _, size in scattered(max(transfers))]
        prefixes = {sum(written[:i]) for i in range(len(written) + 1)}
        assert {e.num_bytes for e in ended} <= prefixes
        for offset, place, size in scattered(len(written)):
            if delivered(offset // 1000 + 1) <= num_done:
                assert bytes(c.far.memory[place:][:size]) == bytes(c.near.memory[offset:][:size])
        if again:
            world.reset_rules()
            c.connect()
            token = c.write(scattered(6))
            assert [(e.token, e.ok) for e in c.near.drain()] == [(token, True)]
    world.check()


@pytest.mark.parametrize("skip", [0, 1, 7])
def test_posting_fails(world, connection, skip):
    """What was posted before is not told as delivered: it was on its way when all was given up."""
    world.fail("ibv_post_send", errno.ENOMEM, skip=skip)
    with world.held():
        first = connection.write(scattered(10))
        later = connection.write(scattered(1))
    ended = {e.token: e for e in connection.near.drain()}
    assert ended[first].status != "success" and ended[first].vendor_error == errno.ENOMEM
    assert ended[first].num_bytes == 0
    assert ended[later].status == FLUSHED
    connection.check_bytes()


def test_reconnecting_ends_transfers_in_flight(world, connection):
    with world.held():
        tokens = [connection.write(scattered(10)) for _ in range(3)]
        connection.connect()
    ended = connection.near.drain()
    assert [(e.token, e.status) for e in ended] == [(token, "closed") for token in tokens]
    connection.check_bytes()
    token = connection.write(scattered(10))
    assert [(e.token, e.ok) for e in connection.near.drain()] == [(token, True)]


def test_reconnecting_with_unpolled_completions(world):
    """Those of the earlier connection are in the queue, which has no room to spare."""
    with Connection(world, depth=6, max_sends=4, max_immediates=2) as c:
        for round_ in range(3):
            tokens = [c.write([(8 * i, 0, 8)], immediate=i) for i in range(2)]
            c.connect()
            ended = c.near.drain()
            assert [e.token for e in ended] == tokens, round_
        c.write([(0, 0, 8)], immediate=5)
        assert c.far.drain()[-1].immediate == 5


@pytest.mark.parametrize("verb", ["ibv_modify_qp", "ibv_post_recv"])
@pytest.mark.parametrize("skip", [0, 1, 2, 3])
def test_failed_reconnect_can_be_retried(world, verb, skip):
    with Connection(world, max_immediates=4) as c:
        with world.held():
            token = c.write(scattered(3))
            c.far.pair.reset()
            world.fail(verb, errno.EIO, skip=skip)
            with pytest.raises(OSError, match=verb):
                c.near.pair.reset()
                c.near.pair.connect(c.far.pair.endpoint)
        if not (verb == "ibv_modify_qp" and skip == 0):  # it was reset
            assert not c.near.pair.connected
            with pytest.raises(InvalidArgument, match="must be connected, but is not"):
                c.write([(0, 0, 8)])
        c.connect()
        [ended] = c.near.drain()
        assert ended.token == token
        for i in range(9):
            c.write([(0, 0, 8)], immediate=i)
            assert [e.immediate for e in c.far.drain()] == [i]


def test_failed_first_connect_can_be_retried(world, connection):
    queue = connection.near.queue
    for verb, skip in (("ibv_post_recv", 1), ("ibv_modify_qp", 1), ("ibv_modify_qp", 2)):
        with queue.queue_pair(max_sends=8, max_immediates=2) as pair:
            world.fail(verb, errno.EIO, skip=skip - (verb == "ibv_modify_qp"))
            with pytest.raises(OSError, match=verb):
                pair.connect(pair.endpoint)
            with pytest.raises(InvalidArgument, match=r"an attempt to .* failed: reset\(\) it"):
                pair.connect(pair.endpoint)
            pair.reset()
            pair.connect(pair.endpoint)
            assert pair.connected
            with pytest.raises(InvalidArgument, match="must be new or reset, but was connected"):
                pair.connect(pair.endpoint)


def test_connecting_to_a_peer_without_reset_is_rejected(world, connection):
    """It would acknowledge what it is sent, as repetitions, and not write it."""
    near, far = connection.near.pair, connection.far.pair
    before = far.endpoint
    near.reset()
    assert near.endpoint != before and not near.connected
    with pytest.raises(InvalidArgument, match="peer must be reset, too"):
        near.connect(far.endpoint)
    far.reset()
    assert far.endpoint.psn != before.psn
    near.connect(far.endpoint)
    far.connect(near.endpoint)
    connection.near.queue.wait(connection.write([(0, 0, 100)]))


def test_failed_poll_loses_no_completions(world, connection):
    """What was found before the error is told by the next poll."""
    tokens = [connection.write([(i, i, 1)]) for i in range(40)]
    world.fail("ibv_poll_cq", errno.EIO, skip=1)
    near = connection.near
    ended = []
    with pytest.raises(OSError, match="ibv_poll_cq: fake0"):
        near.queue.poll()
    ended += near.drain()
    assert [e.token for e in ended] == tokens


def test_close_ends_transfers_in_flight(world, connection):
    near = connection.near
    with world.held():
        tokens = [connection.write(scattered(4)) for _ in range(3)]
        connection.near.pair.close()
        ended = near.queue.poll()
    assert [(e.token, e.status, e.num_bytes) for e in ended] == [(t, "closed", 0) for t in tokens]
    assert near.drain() == []


def test_completions_are_not_attributed_to_the_next_queue_pair(world, connection):
    """A number is given out again, with completions of its former owner in the queue."""
    near = connection.near
    connection.write(scattered(1))
    number = near.pair.number
    near.pair.close()
    near.pair = near.queue.queue_pair()
    assert near.pair.number == number
    connection.connect()
    with world.held():
        token = connection.write(scattered(1))
        assert [e.status for e in near.drain()] == ["closed"]
    assert [e.token for e in near.drain()] == [token]
