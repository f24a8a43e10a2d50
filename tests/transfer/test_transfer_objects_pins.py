"""Objects are pinned while they are being sent, and no longer."""

import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.pool import ObjectPool

from .objects import (
    ABSENT,
    LARGE,
    content,
    here_fixture,  # noqa: F401
    key,
    keys,
    place,
    read,
    serving,
)
from .support import eventually, untouched


def test_object_being_sent_is_not_evicted(here):
    with serving(2 * LARGE) as here:
        data = here.put(1, LARGE)
        here.put(2, 1000)
        with here.ask(1) as reply:
            assert here.pool.stats().num_pins == 1
            assert here.pool.evict(2 * LARGE).keys.tolist() == [list(key(2))]
            assert len(here.pool.evict_keys(keys(1)).keys) == 0
            assert here.pool.remove(key(1)) and here.read(1) == [ABSENT]
            stats = here.pool.stats()
            assert (stats.num_doomed, stats.num_ready) == (1, 0)
            assert here.pool.put_from(key(1), content(9, LARGE // 2)).name == "STORED"
            got = untouched(LARGE)
            assert reply.receive([place(got)], verify=True).all()
        assert (got == data).all()
        eventually(here.is_at_rest)
        assert here.pool.stats().num_doomed == 0


@pytest.mark.parametrize("ends", ["close", "drop", "engine", "peer"])
def test_a_response_that_is_not_received_is_not_kept(ends):
    with serving(2 * LARGE) as here:
        data = here.put(1, LARGE).tobytes()
        with here.near.open(here.far.name) as peer:
            reply = here.near.read_objects(peer, keys(1))
            assert here.pool.stats().num_pins == 1
            if ends == "drop":
                del reply
            elif ends == "close":
                reply.close()
            elif ends == "peer":
                peer.close()
                reply.close()
            else:
                here.far.close()
                with pytest.raises(TransferError, match="connection closed by peer"):
                    reply.receive([[]], verify=True)
            eventually(here.is_at_rest)
            if ends in ("close", "drop"):
                assert read(here.near, peer, keys(1)) == [data]


def test_server_may_close_while_sending():
    with serving(2 * LARGE) as here:
        here.put(1, LARGE)
        with here.ask(1) as reply:
            here.far.close()
            assert here.is_at_rest()
            with pytest.raises(TransferError, match="connection closed by peer") as caught:
                reply.receive([[]], verify=True)
            assert caught.value.peer == here.far.name and not caught.value.timed_out
        with pytest.raises(TransferError, match="connection refused"):
            here.read(1)


def test_served_pool_can_be_replaced_during_a_read():
    with serving(2 * LARGE) as here:
        data = here.put(1, LARGE)
        other = ObjectPool.create(1 << 20)
        other.put_from(key(1), b"another")
        with here.ask(1) as reply:
            here.far.serve(other)
            assert here.read(1) == [b"another"]
            got = untouched(LARGE)
            assert reply.receive([place(got)], verify=True).all()
        assert (got == data).all()
        eventually(here.is_at_rest)
        assert here.pool.counts().num_hits == other.counts().num_hits == 1


def test_served_pool_outlives_its_closed_handle(here):
    data = here.put(1, 1000).tobytes()
    with serving() as other:
        pool = ObjectPool.create(1 << 20)
        pool.put_from(key(1), data)
        other.far.serve(pool)
        pool.close()
        del pool
        assert other.read(1) == [data]
