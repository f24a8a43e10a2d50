"""Endpoints and remote regions as bytes: what a peer may send, and what it may not."""

import dataclasses
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mooncake_kernels import InvalidArgument, rdma

ENDPOINTS = st.builds(
    rdma.Endpoint,
    qp_num=st.integers(0, (1 << 24) - 1),
    psn=st.integers(0, (1 << 24) - 1),
    lid=st.integers(0, (1 << 16) - 1),
    gid=st.binary(min_size=16, max_size=16),
    gid_type=st.sampled_from(["", "IB", "RoCE v1", "RoCE v2"]),
    link_layer=st.sampled_from(["Unspecified", "InfiniBand", "Ethernet"]),
    mtu=st.sampled_from([256, 512, 1024, 2048, 4096]),
    max_reads_in=st.integers(0, 255),
)


@st.composite
def regions(draw):
    at, pieces = draw(st.integers(0, 1 << 60)), []
    for size in draw(st.lists(st.integers(1, 1 << 50), min_size=1, max_size=9)):
        pieces.append((at, size, draw(st.integers(0, (1 << 32) - 1))))
        at += size
    return rdma.RemoteRegion(draw(st.integers(0, 15)), tuple(pieces))


@given(ENDPOINTS)
def test_endpoint_round_trips_through_bytes(endpoint):
    data = endpoint.to_bytes()
    assert len(data) == 36 and rdma.Endpoint.from_bytes(data) == endpoint
    assert rdma.Endpoint.from_bytes(memoryview(bytearray(data))) == endpoint


@given(regions())
def test_region_round_trips_through_bytes(region):
    data = region.to_bytes()
    assert len(data) == 12 + 20 * len(region.pieces)
    again = rdma.RemoteRegion.from_bytes(data)
    assert again == region and again.num_bytes == sum(piece[1] for piece in region.pieces)


@given(st.binary(max_size=80), st.booleans())
def test_foreign_bytes_are_rejected(data, with_magic):
    for kind, magic in ((rdma.Endpoint, b"MKe1"), (rdma.RemoteRegion, b"MKr1")):
        try:
            value = kind.from_bytes(magic + data if with_magic else data)
        except InvalidArgument:
            continue
        assert value.to_bytes() == magic + data


@given(regions(), st.data())
def test_damaged_regions_are_rejected_or_valid(region, data):
    damaged = bytearray(region.to_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    cut = bytes(damaged[: data.draw(st.integers(0, len(damaged)))])
    for candidate in (bytes(damaged), cut):
        try:
            again = rdma.RemoteRegion.from_bytes(candidate)
        except InvalidArgument:
            continue
        assert again.to_bytes() == candidate


@pytest.mark.parametrize(
    "pieces",
    [
        [],
        [(0, 0, 1)],
        [(0, 10, 1), (11, 10, 2)],
        [(0, 10, 1), (9, 10, 2)],
        [(10, (1 << 64) - 10, 1)],
        [(0, 1 << 63, 1), (1 << 63, 1 << 63, 2)],
    ],
)
def test_pieces_must_be_contiguous(pieces):
    data = struct.pack("<4sII", b"MKr1", 6, len(pieces))
    data += b"".join(struct.pack("<QQI", *piece) for piece in pieces)
    with pytest.raises(InvalidArgument):
        rdma.RemoteRegion.from_bytes(data)


def test_piece_count_beyond_the_data_is_rejected():
    with pytest.raises(InvalidArgument, match="must hold the 4294967295 pieces that it says, got"):
        rdma.RemoteRegion.from_bytes(struct.pack("<4sII", b"MKr1", 6, 0xFFFFFFFF))


@given(st.binary(min_size=32, max_size=32))
def test_arbitrary_peer_endpoint_is_harmless(world, data):
    """Whatever it says, connecting to it is refused or fails as the NIC does."""
    endpoint = rdma.Endpoint.from_bytes(b"MKe1" + _plausible(data))
    with rdma.open("fake0") as device, device.completion_queue() as queue:
        pair = queue.queue_pair()
        with pytest.raises((InvalidArgument, OSError)):
            pair.connect(endpoint)
    world.check()


def _plausible(data: bytes) -> bytes:
    fields = bytearray(data)
    fields[10] %= 4  # type of its GID
    fields[11] %= 3  # link layer
    return bytes(fields)


def test_endpoint_str(connection):
    pair = connection.near.pair
    assert str(pair.endpoint) == f"queue pair {pair.number} at ::ffff:10.0.0.1"
    assert dataclasses.replace(pair.endpoint, qp_num=5).qp_num == 5


@pytest.mark.parametrize(
    "change",
    [{"gid": b"short"}, {"gid": None}, {"qp_num": -1}, {"lid": 1 << 17}, {"link_layer": None},
     {"gid_type": "RoCE"}, {"mtu": 1.5}, {"max_reads_in": True}],
)  # fmt: skip
def test_invalid_endpoint_fields_are_rejected(connection, change):
    with pytest.raises(InvalidArgument, match=f"Endpoint: {next(iter(change))} must be"):
        dataclasses.replace(connection.near.pair.endpoint, **change)


@pytest.mark.parametrize("data", [None, 5, "text", [1]])
def test_from_bytes_rejects_non_bytes(data):
    for kind in (rdma.Endpoint, rdma.RemoteRegion):
        with pytest.raises(InvalidArgument, match="from_bytes: data must be bytes"):
            kind.from_bytes(data)
