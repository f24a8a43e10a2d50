"""Registered host memory: rights, pieces, several NICs at once."""

import contextlib
import errno

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kernels import InvalidArgument, rdma

from .pairs import Connection
from .world import LOCAL_WRITE, RELAXED_ORDERING, REMOTE_READ, REMOTE_WRITE

PAGE = 4096
NAMES = ("fake0", "fake1", "fake2", "fake3")


@contextlib.contextmanager
def opened(*names: str):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(rdma.open(name)) for name in names]


@pytest.mark.parametrize(
    ("access", "flags"),
    [
        ("local", LOCAL_WRITE),
        ("remote_read", LOCAL_WRITE | REMOTE_READ),
        ("remote_write", LOCAL_WRITE | REMOTE_WRITE),
        ("remote_read_write", LOCAL_WRITE | REMOTE_READ | REMOTE_WRITE),
    ],
)
@pytest.mark.parametrize("relaxed", [True, False])
def test_rights_reach_the_nic(world, device, access, flags, relaxed):
    memory = torch.zeros(100, dtype=torch.uint8)
    with device.register(memory, access, relaxed_ordering=relaxed) as region:
        assert region.access == access and region.mapping == "host" and region.note == ""
        assert (region.address, region.num_bytes) == (memory.data_ptr(), 100)
        assert region.pieces == [(memory.data_ptr(), 100, region.lkey, region.rkey)]
        assert region.lkey != region.rkey
    [call] = world.log("ibv_reg_mr")
    expected = flags | (RELAXED_ORDERING if relaxed else 0)
    assert call["verb"] == ("ibv_reg_mr_iova2" if relaxed else "ibv_reg_mr")
    assert (call["address"], call["iova"], call["length"]) == (*[memory.data_ptr()] * 2, 100)
    assert call["access"] == expected


def test_read_only_memory(world, device):
    with device.register(bytes(100), "remote_read", relaxed_ordering=False) as region:
        assert region.access == "remote_read"
    assert world.log("ibv_reg_mr")[0]["access"] == REMOTE_READ
    for access in ("remote_write", "remote_read_write"):
        with pytest.raises(InvalidArgument, match=f"must be writable for '{access}', got read-onl"):
            device.register(bytes(100), access)


@given(
    offset=st.integers(0, 2 * PAGE),
    num_bytes=st.integers(1, 5 * PAGE),
    limit=st.integers(1, 4 * PAGE),
    by_device=st.booleans(),
)
def test_pieces(world, offset, num_bytes, limit, by_device):
    """Cut at whole pages, as few as the limit allows, without holes."""
    memory = np.zeros(8 * PAGE, np.uint8)[offset:][:num_bytes]
    world.set_device(max_mr_size=max(limit, PAGE) if by_device else 1 << 62)
    with rdma.open("fake0") as device:
        region = device.register(memory, max_piece_bytes=0 if by_device else limit)
        pieces = region.pieces
        assert pieces[0][0] == region.address
        for piece, following in zip(pieces, [*pieces[1:], None], strict=True):
            end = piece[0] + piece[1]
            assert end == (following[0] if following else region.address + num_bytes)
            assert following is None or end % PAGE == 0
            assert piece[1] <= max(limit // PAGE, 1) * PAGE
        begin = region.address // PAGE * PAGE
        most = max(limit // PAGE, 1) * PAGE
        assert len(pieces) == -(-(region.address + num_bytes - begin) // most)
        assert len({key for piece in pieces for key in piece[2:]}) == 2 * len(pieces)
    world.check()


def test_multi_piece_region_has_no_single_key(device):
    with device.register(bytearray(3 * PAGE), max_piece_bytes=PAGE) as region:
        for name in ("lkey", "rkey"):
            with pytest.raises(InvalidArgument, match=f"{name}: region must be of one piece, got"):
                getattr(region, name)


@given(near=st.integers(1, 4), far=st.integers(1, 4), at=st.integers(0, 1 << 14))
def test_ranges_across_pieces(world, near, far, at):
    with Connection(world, piece=near * PAGE) as c:
        c.far.region.close()
        c.far.region = c.far.device.register(
            c.far.memory, "remote_read_write", max_piece_bytes=far * PAGE
        )
        remote = rdma.RemoteRegion.from_bytes(c.far.region.remote.to_bytes())
        assert remote == c.far.region.remote and remote.num_bytes == c.size
        ranges = [(at, 2 * at, 30000), (1, at, 20001)]
        for reads in (False, True):
            c.submit(reads, ranges)
            c.expect(reads, ranges)
        assert all(e.ok for e in c.near.drain())
        c.check_bytes()
    world.check()


def test_register_on_several_nics(world):
    memory = np.zeros(1000, np.uint8)
    with opened(*NAMES) as devices:
        regions = rdma.register(devices, memory, "remote_write")
        assert [region.device.name for region in regions] == list(NAMES)
        assert len(world.log("ibv_reg_mr")) == 4 == world.live()["region"]


def test_register_on_several_nics_concurrently(world):
    """Each waits within the verb until all four are there."""
    world.meet("ibv_reg_mr_iova2", 4)
    with opened(*NAMES) as devices:
        assert len(rdma.register(devices, bytearray(1 << 20))) == 4


@pytest.mark.parametrize("failing", NAMES)
@pytest.mark.parametrize("skip", [0, 2])
def test_register_on_all_nics_or_none(world, failing, skip):
    """Also if it is a later piece that cannot be registered."""
    with opened(*NAMES) as devices:
        world.fail("ibv_reg_mr_iova2", errno.EIO, device=failing, skip=skip)
        with pytest.raises(OSError, match=f"bytes at 0x.* on {failing}") as caught:
            rdma.register(devices, bytearray(3 * PAGE), max_piece_bytes=PAGE)
        assert caught.value.errno == errno.EIO
        assert "region" not in world.live()
        assert world.calls("ibv_dereg_mr") == world.calls("ibv_reg_mr_iova2") - 1 > 0


def test_duplicate_device_is_rejected(world, device):
    with pytest.raises(InvalidArgument, match=r"each be named once, got \['fake0', 'fake0'\]"):
        rdma.register([device, device], bytearray(10))
    with rdma.open("fake0") as again:  # the same NIC, another protection domain
        assert len(rdma.register([device, again], bytearray(10))) == 2


def test_empty_device_list_is_rejected(world):
    with pytest.raises(InvalidArgument, match="register: devices must name at least one, got none"):
        rdma.register([], bytearray(10))


def test_closed_device_is_rejected(world):
    with opened(*NAMES) as devices:
        devices[2].close()
        with pytest.raises(InvalidArgument, match="register: device fake2 must be open, but is"):
            rdma.register(devices, bytearray(10))
        assert "region" not in world.live()


@pytest.mark.parametrize("memory", [b"", bytearray(), np.zeros((0, 5)), torch.zeros(0)])
def test_empty_buffer_is_rejected(device, memory):
    with pytest.raises(InvalidArgument, match="register: buffer must hold at least one byte"):
        device.register(memory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"access": "write"}, "access must be one of"),
        ({"mapping": "host"}, r"mapping must be one of .*, got 'host'"),
        ({"max_piece_bytes": -1}, "max_piece_bytes must be an integer in 0 to .*, got -1"),
        ({"max_piece_bytes": 1.5}, "max_piece_bytes must be an integer in 0 to .*, got 1.5"),
        ({"buffer": np.zeros((4, 4))[:, 1]}, "buffer must be packed"),
        ({"buffer": [1, 2]}, "got list"),
    ],
)
def test_error_names_bad_argument(device, change, message):
    with pytest.raises(InvalidArgument, match=message):
        device.register(**({"buffer": bytearray(10)} | change))


def test_region_keeps_its_memory_alive(device):
    memory = bytearray(100)
    region = device.register(memory)
    with pytest.raises(BufferError):
        memory.extend(b"more")
    region.close()
    region.close()
    with pytest.raises(InvalidArgument, match="pieces: region of 100 bytes on fake0 must be open"):
        _ = region.rkey


@pytest.mark.parametrize("mapping", ["dmabuf", "peermem"])
def test_gpu_mapping_of_host_memory_is_rejected(world, device, mapping):
    message = f'mapping must be "auto" for host memory, got "{mapping}"'
    with pytest.raises(InvalidArgument, match=message):
        device.register(bytearray(8192), mapping=mapping)
    with rdma.RegistrationCache([device], mapping=mapping) as cache:
        with pytest.raises(InvalidArgument, match=message):
            cache.lease(np.zeros(8192))
    assert "region" not in world.live()
