"""What an engine over NICs refuses, and its messages."""

import errno
import ipaddress
import logging
import struct

import numpy as np
import pytest

from mooncake_kernels import InvalidArgument, TransferError, Unavailable, rdma
from mooncake_kernels.topology import Nic, NumaNode, System, Topology
from mooncake_kernels.transfer import TransferEngine

from ...transfer.handshake import begin, receive_exactly
from ...transfer.support import ACK, HEADER, connect, ended
from .engines import ALL, engines, topology_of

NICS, ATTACH, DETACH, KEYS, FLUSH = range(7, 12)
NIC_BYTES, KEYS_ENTRY, KEY_ENTRY = 80, struct.Struct("<QQQII"), struct.Struct("<QQII")
QUEUE_PAIR = struct.Struct("<IIIIIHH16s")


@pytest.mark.parametrize(("access", "direction"), [("read", "write"), ("write", "read")])
def test_missing_access_right_is_refused(access, direction):
    with engines(access=access) as pair:
        before = pair.here.copy(), pair.there.copy()
        with pytest.raises(TransferError, match=f"in a region that peers may not {direction}"):
            (pair.write if direction == "write" else pair.read)([(0, 0, 100)]).wait()
        np.testing.assert_array_equal(pair.here, before[0])
        np.testing.assert_array_equal(pair.there, before[1])


@pytest.mark.parametrize("count", [1, 9000])
def test_range_outside_the_region_is_refused(count):
    """Nothing of the request has moved, in one piece or in many."""
    with engines(1 << 20) as pair:
        before = pair.there.copy()
        rows = [(100 * i, 100 * i, 90) for i in range(count)]
        rows.append((0, (1 << 20) - 1, 2))
        with pytest.raises(TransferError, match=rf"descriptors\[{count}\] remote range 0x"):
            pair.write(rows).wait()
        np.testing.assert_array_equal(pair.there, before)


def test_register_fails_when_no_nic_can_register(world):
    world.fail("ibv_reg_mr_iova2", errno.ENOMEM, count=1 << 20)
    with (
        TransferEngine(transports=["rdma"], topology=topology_of()) as engine,
        pytest.raises(OSError, match="Cannot allocate memory"),
    ):
        engine.register(np.zeros(4096, np.uint8))


def test_unregistrable_memory_uses_tcp_unless_rdma_is_named(world, caplog):
    world.fail("ibv_reg_mr_iova2", errno.ENOMEM, count=1 << 20)
    with (
        TransferEngine(topology=topology_of()) as engine,
        caplog.at_level(logging.WARNING, "mooncake_kernels"),
    ):
        region = engine.register(np.zeros(4096, np.uint8))
        assert "Cannot allocate memory" in region.note
        assert "NICs cannot use a region" in caplog.text


def test_peer_without_nics_is_reached_by_tcp_if_allowed():
    memory = np.arange(256, dtype=np.uint8)
    target = np.zeros(256, np.uint8)
    with (
        TransferEngine(transports=["tcp"]) as far,
        TransferEngine(transports=["rdma"], topology=topology_of()) as only,
        TransferEngine(transports=["rdma", "tcp"], topology=topology_of()) as either,
    ):
        with pytest.raises(TransferError, match="no NIC that can be connected with ours"):
            only.open(far.name)
        there, here = far.register(target), either.register(memory)
        with either.open(far.name) as peer:
            assert peer.transport == "tcp"
            either.write(peer, [(here.address, there.address, 256)], notify=b"x").wait()
        assert (target == memory).all()


def test_engine_without_tcp_rejects_tcp_transfers():
    """Its peers cannot choose that for it, though it listens, to agree upon NICs."""
    memory = np.arange(256, dtype=np.uint8)
    target = np.zeros(256, np.uint8)
    with (
        TransferEngine(transports=["rdma"], topology=topology_of()) as far,
        TransferEngine(transports=["tcp"]) as near,
        near.open(far.name) as peer,
    ):
        row = [(near.register(memory).address, far.register(target).address, 256)]
        for move in (near.write, near.read):
            with pytest.raises(TransferError, match="the peer has tcp disabled"):
                move(peer, row).wait()
            assert not target.any() and memory.any()


def test_disjoint_fabrics_cannot_connect(world):
    for index in (2, 3):
        world.set_port(index, link_layer="InfiniBand")
    with pytest.raises(TransferError, match="no NIC that can be connected with ours"), engines():
        pass


def test_rdma_without_any_nic_is_unavailable(world):
    with pytest.raises(Unavailable, match="no NIC can be chosen: cpu:0: this machine has no NIC"):
        TransferEngine(transports=["rdma"], topology=Topology(System()))
    world.reset(0)
    with pytest.raises(Unavailable, match="this machine has no RDMA device"):
        TransferEngine(transports=["rdma"])
    with TransferEngine() as engine:  # which nobody has told to use any
        assert engine.register(np.zeros(8, np.uint8)).note == ""


@pytest.mark.parametrize("num_nics", [4, 0])
def test_topology_without_nics_fails_only_if_rdma_is_named(world, caplog, num_nics):
    world.reset(num_nics)
    topology = Topology(System()) if num_nics else topology_of()
    with TransferEngine(topology=topology) as engine:
        assert engine.register(np.zeros(8, np.uint8)).note == ""
    reason = "no NIC can be chosen" if num_nics else "this machine has no RDMA device"
    (record,) = (entry for entry in caplog.records if entry.levelname == "WARNING")
    assert record.message.startswith(f"no rdma: TransferEngine: {reason}")
    with pytest.raises(Unavailable, match=reason):
        TransferEngine(transports=["rdma"], topology=topology)


def test_failed_topology_discovery_triggers_warning(world, caplog, monkeypatch):
    """There are NICs, which nobody would miss otherwise."""

    def fails(root: str = "/") -> Topology:
        raise InvalidArgument("discover: root must be a machine's files")

    monkeypatch.setattr(Topology, "discover", fails)
    with TransferEngine():
        pass
    (record,) = (entry for entry in caplog.records if entry.levelname == "WARNING")
    assert record.message == "no rdma: discover: root must be a machine's files"


def test_invalid_topology_is_rejected():
    with pytest.raises(InvalidArgument, match="topology must be a Topology or None, got 'fake0'"):
        TransferEngine(transports=["rdma"], topology="fake0")
    with pytest.raises(InvalidArgument, match='got "mlx5_7"'):
        TransferEngine(transports=["rdma"], topology=topology_of(["mlx5_7"]))


def test_a_nic_that_cannot_be_opened_is_left_out(world, caplog):
    world.fail("ibv_open_device", errno.EIO, device="fake1", count=1 << 20)
    with engines(near=ALL[:3], far=["fake3"], transports=["rdma", "tcp"]) as pair:
        pair.move("write", [(0, 0, 1 << 16)])
        paths = pair.near.stats()["paths"][pair.peer.name]
        assert paths["fake0"]["num_bytes_written"] + paths["fake2"]["num_bytes_written"] == 1 << 16
        (record,) = (entry for entry in caplog.records if entry.levelname == "WARNING")
        assert record.engine == pair.near.name
        assert record.cause == "fake1: ibv_open_device: fake1: Input/output error"


def test_left_out_nics_are_not_near_any_memory(world):
    """The numbers of those that are left change."""
    world.fail("ibv_open_device", errno.EIO, device="fake0", count=1 << 20)
    facts = {"state": "ACTIVE", "gbit_per_s": 100.0, "link_layer": "Ethernet", "has_gid": True}
    nics = tuple(Nic(f"fake{i}", numa=i // 2, **facts) for i in range(3))
    topology = Topology(System(numa=(NumaNode(0), NumaNode(1)), nics=nics))
    memory = np.zeros(4096, np.uint8)
    with (
        TransferEngine(transports=["rdma"], topology=topology) as engine,
        connect(engine.name) as connection,
    ):
        begin(connection)
        _, keys = ask(connection, KEYS, struct.pack("<Q", engine.register(memory).address))
        near = KEYS_ENTRY.unpack_from(keys)[2]
        assert near == 0b01  # fake1, as the memory is on node 0


@pytest.mark.parametrize(
    ("verb", "topology"),
    [
        ("ibv_open_device", None),
        ("ibv_open_device", topology_of()),
        ("ibv_alloc_pd", topology_of()),
    ],
)
def test_rdma_fails_when_no_nic_can_be_opened(world, caplog, verb, topology):
    world.fail(verb, errno.EACCES, count=1 << 20)
    with (
        caplog.at_level(logging.INFO, "mooncake_kernels"),
        TransferEngine(topology=topology) as engine,
    ):
        assert engine.register(np.zeros(8, np.uint8)).note == ""
        assert f"{verb}: fake0: Permission denied" in caplog.text
    with pytest.raises(PermissionError, match=f"{verb}: fake0"):
        TransferEngine(transports=["rdma", "tcp"], topology=topology)


@pytest.fixture
def stranger():
    """A connection of nobody we know to an engine with four NICs and a region."""
    with (
        TransferEngine(transports=["rdma"], topology=topology_of()) as engine,
        connect(engine.name) as connection,
    ):
        region = engine.register(np.zeros(4096, np.uint8), "write")
        begin(connection)
        yield connection, region


def ask(connection, op: int, payload: bytes = b"", request: int = 1) -> tuple[int, bytes]:
    """The status of the answer, and what it says."""
    connection.sendall(HEADER.pack(op, 0, request, 0, len(payload)) + payload)
    status, refusal_bytes, answered, num_bytes = ACK.unpack(receive_exactly(connection, ACK.size))
    assert answered == request
    return status, receive_exactly(connection, refusal_bytes or num_bytes)


def queue_pair(number: int = 99, mtu: int = 1024, layer: int = 2, kind: int = 3) -> bytes:
    gids = rdma.devices()[1].ports[0].gids
    gid = next(ipaddress.IPv6Address(gid.gid).packed for gid in gids if gid.type == "RoCE v2")
    return QUEUE_PAIR.pack(number, 7, mtu, 16, 0, layer, kind, gid)


def test_nics_and_keys_reported_on_the_wire(stranger):
    connection, region = stranger
    status, nics = ask(connection, NICS)
    names = [nics[i : i + 64].rstrip(b"\0").decode() for i in range(0, len(nics), NIC_BYTES)]
    assert (status, names) == (0, list(ALL))
    assert ask(connection, KEYS) == (0, b"")  # nobody is told what he does not know
    inside = struct.pack("<QQQ", region.address + 4095, region.address + 4096, 8)
    status, keys = ask(connection, KEYS, inside)
    address, num_bytes, near, rights, num_keys = KEYS_ENTRY.unpack_from(keys)
    assert (status, address, num_bytes) == (0, region.address, 4096)
    assert (rights & 6, num_keys) == (4, 4)
    assert near & 15 == 15
    told = [KEY_ENTRY.unpack_from(keys, KEYS_ENTRY.size + i * KEY_ENTRY.size) for i in range(4)]
    assert [(at, size, nic) for at, size, _, nic in told] == [
        (address, num_bytes, nic) for nic in range(4)
    ]


@pytest.mark.parametrize(
    ("rail", "nic", "fields", "why"),
    [
        (0, 4, {}, "there is no such NIC"),
        (64, 0, {}, "too many queue pairs"),
        (0, 0, {"layer": 1}, "peer must be on Ethernet"),
        (0, 0, {"mtu": 300}, "an MTU of 256 to 4096, got 300"),
        (0, 0, {"number": 1 << 24}, "numbers of 24 bits"),
    ],
)
def test_attaching_is_refused(world, stranger, rail, nic, fields, why):
    connection, _ = stranger
    status, text = ask(connection, ATTACH, struct.pack("<II", rail, nic) + queue_pair(**fields))
    assert status == 1
    assert why in text.decode()
    assert "queue pair" not in world.live()
    assert ask(connection, NICS)[0] == 0  # the connection stays good


@pytest.mark.parametrize(
    ("op", "payload"),
    [
        (NICS, b"x"),
        (KEYS, b"x"),
        (KEYS, bytes(8 * 8193)),
        (ATTACH, bytes(47)),
        (ATTACH, bytes(8) + QUEUE_PAIR.pack(99, 7, 1024, 16, 0, 3, 3, bytes(16))),
        (ATTACH, bytes(8) + QUEUE_PAIR.pack(99, 7, 1024, 16, 0, 2, 4, bytes(16))),
        (DETACH, bytes(7)),
        (FLUSH, bytes(5)),
        (FLUSH, bytes(4 * 65)),
        (14, b""),
    ],
)
def test_malformed_requests_end_the_connection(world, stranger, op, payload):
    connection, _ = stranger
    connection.sendall(HEADER.pack(op, 0, 1, 0, len(payload)) + payload)
    assert ended(connection)
    assert "queue pair" not in world.live()


def test_flush_of_an_unattached_rail_is_refused(stranger):
    connection, _ = stranger
    assert ask(connection, FLUSH, struct.pack("<I", 3)) == (1, b"there is no such rail")
    assert ask(connection, DETACH, struct.pack("<II", 3, 0)) == (0, b"")
    assert ask(connection, FLUSH) == (0, b"")


def test_queue_pairs_end_with_their_connection(world, stranger):
    connection, _ = stranger
    for rail in range(6):
        assert ask(connection, ATTACH, struct.pack("<II", rail, rail % 4) + queue_pair())[0] == 0
    assert ask(connection, ATTACH, struct.pack("<II", 5, 0) + queue_pair())[0] == 0
    assert world.live()["queue pair"] == 6
    assert ask(connection, DETACH, struct.pack("<II", 0, 0))[0] == 0
    assert world.live()["queue pair"] == 5
    connection.shutdown(1)
    assert connection.recv(1) == b""
    assert "queue pair" not in world.live()
