"""Operations that the other side does not allow fail with its status, and write nothing."""

import pytest

import mooncake_kernels as mk
from mooncake_kernels.rdma import RemoteRegion
from mooncake_kernels.rdma.region import REMOTE_READ, REMOTE_WRITE

from .links import Link, noise


@pytest.fixture
def link():
    with Link() as link:
        link.a.memory[:] = noise(1 << 20)
        yield link


def forged(remote: RemoteRegion, *, more_bytes: int = 0, key: int = 0) -> RemoteRegion:
    """A description that its owner did not give."""
    ((address, num_bytes, rkey),) = remote.pieces
    return RemoteRegion(
        REMOTE_READ | REMOTE_WRITE, ((address, num_bytes + more_bytes, rkey ^ key),)
    )


def expect_refusal(link: Link, remote: RemoteRegion, here: int, there: int, size: int) -> None:
    before = link.b.memory.copy()
    rows = [(link.a.region.address + here, link.b.region.address + there, size)]
    token = link.a.pair.write(link.a.region, remote, rows)
    with pytest.raises(mk.TransferError, match="remote access error"):
        link.a.queue.wait(token)
    assert (link.b.memory == before).all()
    assert not link.a.pair.connected


def test_wrong_key_is_refused(link):
    expect_refusal(link, forged(link.b.region.remote, key=0x5500), 0, 0, 4096)


def test_range_beyond_the_region_is_refused(link):
    expect_refusal(link, forged(link.b.region.remote, more_bytes=4096), 0, (1 << 20) - 100, 200)


def test_write_to_read_only_region_is_refused(link):
    with link.b.device.register(link.b.memory, "remote_read") as region:
        expect_refusal(link, forged(region.remote), 0, 0, 4096)


def test_write_to_local_only_region_is_refused(link):
    with link.b.device.register(link.b.memory, "local") as region:
        expect_refusal(link, forged(region.remote), 0, 0, 4096)
        rows = [(link.a.region.address, link.b.region.address, 1)]
        with pytest.raises(mk.InvalidArgument, match="registered with remote_write"):
            link.a.pair.write(link.a.region, region.remote, rows)


def test_write_to_closed_region_is_refused(link):
    remote = link.b.region.remote
    link.b.region.close()
    expect_refusal(link, remote, 0, 0, 4096)


def test_failure_fails_later_transfers_until_reconnected(link):
    bad = link.a.pair.write(
        link.a.region,
        forged(link.b.region.remote, key=0x5500),
        [(link.a.region.address, link.b.region.address, 10)],
    )
    good = [link.a.write(link.b, [(0, 0, 10)]) for _ in range(5)]
    seen = {}
    while len(seen) < 6:
        seen |= {c.token: c for c in link.a.queue.poll(timeout_s=20.0)}
    assert seen[bad].status == "remote access error"
    assert {seen[token].status for token in good} == {"Work Request Flushed Error"}
    assert all(completion.num_bytes == 0 for completion in seen.values())
    link.connect()
    link.a.queue.wait(link.a.write(link.b, [(0, 0, 1 << 20)]))
    assert (link.a.memory == link.b.memory).all()


def test_bytes_before_the_failure_are_counted(link):
    here, there = link.a.region.address, link.b.region.address
    remote = forged(link.b.region.remote, more_bytes=1 << 20)
    rows = [(here, there, 1000), (here, there + 5000, 500), (here, there + (1 << 20), 10)]
    token = link.a.pair.write(link.a.region, remote, rows)
    with pytest.raises(mk.TransferError) as error:
        link.a.queue.wait(token)
    assert error.value.num_bytes_done == 1500
    assert (link.b.memory[:1000] == link.a.memory[:1000]).all()
