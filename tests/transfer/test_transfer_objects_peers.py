"""Which peers can be asked for objects, and which answer."""

from pathlib import Path

import pytest

from mooncake_kernels.buffers import shared_memory
from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.transfer import TransferEngine

from .objects import (
    ABSENT,
    DONE,
    LARGE,
    MOST,
    SIZE,
    content,
    here_fixture,  # noqa: F401
    keys,
    serving,
    through,
)
from .secret import OURS, THEIRS
from .support import addressed, eventually, untouched


def test_local_and_file_peers_have_no_object_channel(here, tmp_path):
    (tmp_path / "file").write_bytes(bytes(4096))
    with TransferEngine() as engine:
        for name in (here.far.name, f"file:{tmp_path}/file"):
            with engine.open(name) as peer:
                for ask in (
                    lambda peer=peer: engine.read_objects(peer, keys(1)),
                    lambda peer=peer: engine.write_objects(peer, keys(1), [[]]),
                    lambda peer=peer: engine.remove_objects(peer, keys(1)),
                ):
                    with pytest.raises(Unavailable, match="has no channel for RPC"):
                        ask()


def test_requests_fail_when_peer_serves_nothing(here):
    data = here.put(1, 100).tobytes()
    with through(here) as (here, proxy):
        assert here.read(1) == [data]
        assert here.far.serve(None) is None
        for ask in (
            lambda: here.read(1),
            lambda: here.write({2: content(2, 200_000)}),
            lambda: here.remove(1),
        ):
            with pytest.raises(Unavailable, match=f"{here.peer.name}: it serves no objects"):
                ask()
        here.far.serve(here.pool, may_write=True)
        assert here.read(1, 2) == [data, ABSENT]
        assert here.write({2: content(2, 200_000)}) == [DONE]
        assert len(proxy.relays) == 2  # one of the lane, and one: it has stayed good


def test_connections_are_reused(here):
    data = here.put(1, 100_000).tobytes()
    with through(here) as (here, proxy):
        for number in range(20):
            assert here.read(1, 99) == [data, ABSENT]
            assert here.write({100 + number: content(1, 1000)}) == [DONE]
            assert here.remove(100 + number) == [DONE]
            here.ask(99).close()  # nothing is left of it: it costs nothing
        assert len(proxy.relays) == 2
        here.ask(1).close()
        assert here.read(1) == [data]
        assert len(proxy.relays) == 3


def test_shm_object_reads_map_no_peer_memory():
    def num_mapped() -> int:
        return Path("/proc/self/maps").read_text().count("/memfd:mooncake_kernels")

    with serving(transport="shm") as both:
        data = both.put(1, SIZE).tobytes()
        both.far.register(shared_memory(SIZE).numpy())
        before = num_mapped()
        assert both.read(1) == [data]
        assert num_mapped() == before


def test_a_response_that_is_not_received_blocks_no_one():
    with serving(2 * LARGE) as here:
        here.put(1, LARGE)
        small = here.put(2, 100)
        near, far = here.near.register(addressed(4096)), here.far.register(untouched(4096))
        with here.ask(1), here.ask(1), here.ask(1):
            assert here.pool.stats().num_pins == 3
            assert here.read(2) == [small.tobytes()]
            here.near.write(here.peer, [(near.address, far.address, 4096)]).wait()
        assert (far._buffer.owner == addressed(4096)).all()


@pytest.mark.parametrize("checked", [True, False])
def test_objects_with_a_secret(checked):
    secret = {"secret": OURS}
    with serving(near=secret, far=secret) as here:
        objects = {1: content(1, 100), 2: content(2, 3 << 20)}
        assert here.write(objects, verify=checked) == [DONE, DONE]
        assert here.read(1, 2, verify=checked) == [data.tobytes() for data in objects.values()]
        for other in (None, THEIRS):
            with TransferEngine(transports=["tcp"], secret=other) as stranger:
                with pytest.raises(TransferError):
                    stranger.open(here.far.name)


@pytest.mark.parametrize("secret", [None, OURS])
def test_over_tls(node, secret):
    options = {"tls": node, "secret": secret}
    with serving(3 * MOST, near=options, far=options) as here:
        sizes = (0, 1, 16383, 16384, 16385, (3 << 20) + 5, LARGE)
        objects = {i: content(i, size) for i, size in enumerate(sizes)}
        assert here.write(objects) == [DONE] * len(sizes)
        expected = [data.tobytes() for data in objects.values()]
        assert here.read(*objects) == expected
        with here.ask(*objects) as reply:
            assert reply.receive([[]] * len(sizes), verify=True).all()
        here.ask(6).close()
        assert here.read(*objects) == expected
        assert here.remove(*objects, 99) == [DONE] * len(sizes) + [ABSENT]
        eventually(here.is_at_rest)
