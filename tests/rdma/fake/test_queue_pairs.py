"""Queue pairs: their options, and which can be connected."""

import dataclasses
import errno

import pytest

from mooncake_kernels import InvalidArgument

from .pairs import Connection


@pytest.fixture
def queue(device):
    return device.completion_queue(64)


@pytest.mark.parametrize("depth", [0, -1, 65537])
def test_depths(world, device, depth):
    with pytest.raises(InvalidArgument, match=f"must be in 1 to 65536 on fake0, got {depth}"):
        device.completion_queue(depth)
    with pytest.raises(InvalidArgument, match=r"depth must be an integer in .*, got 1\.5"):
        device.completion_queue(1.5)
    assert world.live() == {"context": 1, "protection domain": 1}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port": 0}, "port must be in 1 to 1 on fake0, got 0"),
        ({"port": 2}, "port must be in 1 to 1 on fake0, got 2"),
        ({"max_sends": 0}, "max_sends must be in 1 to 4096 on fake0, got 0"),
        ({"max_sends": 4097}, "max_sends must be in 1 to 4096 on fake0, got 4097"),
        ({"max_sges": 0}, "max_sges must be in 1 to"),
        ({"max_immediates": -1}, "max_immediates must be in 0 to 4096 on fake0, got -1"),
        ({"max_immediates": 4097}, "max_immediates must be in 0 to 4096"),
        ({"gid_index": 2}, "gid_index must be of a GID that is set on fake0 port 1, got 2"),
        ({"max_sends": 60, "max_immediates": 5}, "room for 65 .* got a depth of 64, 0 of it taken"),
    ],
)
def test_error_names_bad_option(world, queue, options, message):
    with pytest.raises(InvalidArgument, match=message):
        queue.queue_pair(**({"max_sends": 8} | options))
    assert "queue pair" not in world.live()


def test_queue_pairs_share_completion_queue_capacity(queue):
    first = queue.queue_pair(max_sends=40)
    with pytest.raises(InvalidArgument, match="room for 25 .* depth of 64, 40 of it taken"):
        queue.queue_pair(max_sends=25)
    first.close()
    assert queue.queue_pair(max_sends=60, max_immediates=4).number > 0


def test_requested_sizes_are_capped_by_the_device(world, queue):
    queue.queue_pair(max_sends=7, max_sges=100, max_immediates=3)
    [call] = world.log("ibv_create_qp")
    sizes = (call["max_send_wr"], call["max_recv_wr"], call["max_send_sge"])
    assert sizes == (7, 3, 8)  # of parts as many as the device has


@pytest.mark.parametrize("verb", ["ibv_create_qp", "ibv_modify_qp", "ibv_query_port"])
def test_failed_queue_pair_creation_returns_capacity(world, queue, verb):
    world.fail(verb, errno.ENOMEM)
    with pytest.raises(OSError, match=verb) as caught:
        queue.queue_pair(max_sends=8)
    assert caught.value.errno == errno.ENOMEM
    assert "queue pair" not in world.live()
    assert queue.queue_pair(max_sends=64)  # all its room is there


@pytest.mark.parametrize("verb", ["ibv_create_comp_channel", "ibv_create_cq"])
def test_failed_completion_queue_creation(world, device, verb):
    world.fail(verb, errno.EMFILE)
    with pytest.raises(OSError, match=f"{verb}.*fake0"):
        device.completion_queue()
    assert world.live() == {"context": 1, "protection domain": 1}


def test_queue_pairs_beyond_the_device_limit_fail(world, queue):
    world.set_device(max_qp=1)
    first = queue.queue_pair(max_sends=4)
    with pytest.raises(OSError, match="ibv_create_qp: 5 sends and 0 immediates on fake0") as caught:
        queue.queue_pair(max_sends=5)
    assert caught.value.errno == errno.ENOMEM
    first.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"link_layer": "InfiniBand"}, "be on Ethernet like this port, got InfiniBand"),
        ({"gid_type": "RoCE v1"}, "a GID of type RoCE v2 like this port, got RoCE v1: choose"),
        ({"mtu": 0}, "an MTU of 256 to 4096, got 0"),
        ({"mtu": 1500}, "an MTU of 256 to 4096, got 1500"),
        ({"mtu": 8192}, "an MTU of 256 to 4096, got 8192"),
        ({"qp_num": 1 << 24}, "numbers of 24 bits, got queue pair 16777216"),
        ({"psn": 1 << 24}, "numbers of 24 bits"),
    ],
)
def test_incompatible_endpoints_are_rejected(connection, change, message):
    peer = dataclasses.replace(connection.far.pair.endpoint, **change)
    with pytest.raises(InvalidArgument, match=f"peer must (have )?{message}"):
        connection.near.pair.connect(peer)
    assert connection.near.pair.connected  # as before


@pytest.mark.parametrize(
    ("option", "most"),
    [
        *(("timeout", 31), ("retries", 7), ("rnr_retries", 7)),
        *(("traffic_class", 255), ("service_level", 15)),
    ],
)
def test_connect_options(world, connection, option, most):
    for value in (-1, most + 1):
        with pytest.raises(InvalidArgument, match=f"connect: {option} must be in 0 to {most}, got"):
            connection.connect(**{option: value})
    connection.connect(**{option: most})
    names = {"retries": "retry_cnt", "service_level": "sl"}
    name = names.get(option, option)
    if option != "rnr_retries":
        assert any(call[name] == most for call in world.log("ibv_modify_qp"))


def test_the_smaller_mtu_is_used(world):
    world.set_port(1, active_mtu=5)
    with Connection(world):
        steps = [call for call in world.log("ibv_modify_qp") if call["state"] == 2]
        assert [call["path_mtu"] for call in steps] == [3, 3]  # IBV_MTU_1024


def test_reads_in_flight(world):
    world.set_device(0, max_qp_rd_atom=3, max_qp_init_rd_atom=200)
    world.set_device(1, max_qp_rd_atom=1000, max_qp_init_rd_atom=2)
    with Connection(world) as c:
        assert (c.near.pair.endpoint.max_reads_in, c.far.pair.endpoint.max_reads_in) == (3, 255)
        steps = [call for call in world.log("ibv_modify_qp") if call["state"] == 3]
        assert [call["max_rd_atomic"] for call in steps] == [200, 2]


@pytest.mark.parametrize(
    ("lid", "prefix", "is_global"), [(0, "fe80:", 1), (7, "fe80:", 0), (7, "fec0:0:0:5:", 1)]
)
def test_infiniband(world, lid, prefix, is_global):
    """Within a subnet by LID; with a global header where there is none, and to another subnet,
    since routers go by the GID, whatever the LIDs.
    """
    for i in range(2):
        world.set_port(i, link_layer="InfiniBand", lid=lid and lid + i)
        world.set_gid(0, f"{prefix if i else 'fe80:'}:{i + 1}", "IB", index=i)
    with Connection(world) as c:
        steps = [call for call in world.log("ibv_modify_qp") if call["state"] == 2]
        assert [call["is_global"] for call in steps] == [is_global] * 2
        c.near.queue.wait(c.write([(0, 0, 100)]))
        c.expect(False, [(0, 0, 100)])
        c.check_bytes()


def test_connect_without_a_route_fails(world, queue, connection):
    pair = queue.queue_pair(max_sends=8)
    peer = dataclasses.replace(connection.far.pair.endpoint, gid=bytes(15) + b"\1")
    message = f"ibv_modify_qp: queue pair {pair.number} of fake0 to RTR: no route from this port"
    with pytest.raises(OSError, match=message):
        pair.connect(peer)


def test_unconnected_queue_pair_rejects_transfers(world, queue, connection):
    pair = queue.queue_pair(max_sends=8)
    near, far = connection.near, connection.far
    assert not pair.connected and near.pair.connected
    with queue.device.register(bytearray(100)) as region:
        with pytest.raises(InvalidArgument, match=f"write: queue pair {pair.number} .* must be co"):
            pair.write(region, far.region.remote, [])
    pair.close()
    with pytest.raises(InvalidArgument, match="connect: queue pair .* of fake0 must be open, but"):
        pair.connect(far.pair.endpoint)
    assert not pair.connected
