"""Connections are shared, kept, and closed when they fail and no one uses them."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from mooncake_kernels.errors import TransferError
from mooncake_kernels.transfer import TransferEngine
from mooncake_serving.rpc import Peers

from .support import WAIT_S


def test_all_users_share_one_peer(made):
    with ThreadPoolExecutor(8) as executor:
        leases = list(executor.map(lambda _: made.peers.lease(made.name, WAIT_S), range(16)))
    [peer] = {lease.peer for lease in leases}
    for lease in leases:
        lease.end()
    assert not peer.closed and made.peers.is_open(made.name)


def test_failed_peer_is_reopened_and_closed_by_its_last_user(made):
    other = made.peers.lease(made.name, WAIT_S)
    with pytest.raises(TransferError), made.peers.lease(made.name, WAIT_S) as peer:
        raise TransferError(made.name, "connection reset")
    assert peer is other.peer and not peer.closed and not made.peers.is_open(made.name)
    with made.peers.lease(made.name, WAIT_S) as again:
        assert again is not peer
    other.end(TransferError(made.name, "connection reset"))  # of the old one
    assert peer.closed and not again.closed and made.peers.is_open(made.name)


def test_a_lease_ends_once(made):
    one, other = (made.peers.lease(made.name, WAIT_S) for _ in range(2))
    one.end()
    one.end()
    made.peers.forget(made.name)
    assert not other.peer.closed
    other.end()
    assert other.peer.closed


def test_unrelated_error_leaves_the_peer_open(made):
    with pytest.raises(ZeroDivisionError), made.peers.lease(made.name, WAIT_S) as peer:
        raise ZeroDivisionError
    assert made.peers.is_open(made.name) and not peer.closed


def test_peers_not_kept_are_closed_once_unused(made):
    with TransferEngine(transports=["tcp"]) as third:
        used, unused = made.peers.lease(made.name, WAIT_S), made.peers.lease(third.name, WAIT_S)
        unused.end()
        made.peers.keep([made.name, third.name])
        assert not unused.peer.closed
        made.peers.keep([])
        assert unused.peer.closed and not used.peer.closed
        used.end()
        assert used.peer.closed and not made.peers._users


def test_forgetting_an_unknown_peer_does_nothing(made):
    made.peers.forget("nobody")


def test_close_also_closes_peers_in_use(made):
    peers = Peers(made.asking)
    forgotten = peers.lease(made.name, WAIT_S)
    peers.forget(made.name)
    used = peers.lease(made.name, WAIT_S)
    peers.close()
    peers.close()
    assert forgotten.peer.closed and used.peer.closed
    assert not peers._users, "a peer has its descriptors until nobody refers to it"
    for lease in (forgotten, used):
        lease.end()
    for name in (made.name, "127.0.0.1:1"):  # no one is connected to any more
        with pytest.raises(TransferError, match="this side was closed"):
            peers.lease(name, WAIT_S)
