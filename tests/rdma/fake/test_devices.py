"""The attributes that NICs report, and opening them."""

import errno

import pytest

from mooncake_kernels import InvalidArgument, Unavailable, rdma

IPV6 = "2001:db8::1"
LINK_LOCAL = "fe80::1"


def test_device_info(world):
    world.set_device(max_mr_size=1 << 30, max_sge=5, max_qp=77)
    world.add_port()
    world.set_port(port=2, state="DOWN", link_layer="InfiniBand", lid=9, active_mtu=5)
    world.set_gid(2, LINK_LOCAL, "RoCE v2")
    [info, *_] = rdma.devices()
    assert info.name == "fake0" and info.node_guid == "506b:4b03:00c2:6ae0"
    assert (info.max_mr_bytes, info.max_sge, info.max_qp) == (1 << 30, 5, 77)
    assert info.pci is None and info.numa is None and info.firmware == "20.31.1014"
    first, second = info.ports
    assert (first.number, first.state, first.link_layer) == (1, "ACTIVE", "Ethernet")
    assert (first.active_mtu, first.max_mtu, first.lid) == (1024, 4096, 0)
    assert [(gid.index, gid.gid, gid.type) for gid in first.gids] == [
        (0, "::ffff:10.0.0.1", "RoCE v1"),
        (1, "::ffff:10.0.0.1", "RoCE v2"),
        (2, "fe80::1", "RoCE v2"),
    ]
    assert (second.state, second.link_layer, second.lid, second.active_mtu) == (
        *("DOWN", "InfiniBand", 9, 4096),
    )


def test_unset_gids_are_left_out(world):
    world.set_gid(5, IPV6, "RoCE v2")
    world.set_gid(0, "::", "RoCE v1")
    [port] = rdma.devices()[0].ports
    assert [gid.index for gid in port.gids] == [1, 5]


def test_machine_without_rdma_devices(world):
    world.reset(num_devices=0)
    assert rdma.devices() == []
    with pytest.raises(Unavailable, match='open: this machine has no RDMA device, got "fake0"'):
        rdma.open("fake0")


def test_kernel_without_rdma_support(world):
    world.fail("ibv_get_device_list", errno.ENOSYS, count=2)
    assert rdma.devices() == []
    with pytest.raises(Unavailable, match="no RDMA device"):
        rdma.open("fake0")
    world.fail("ibv_get_device_list", errno.EPERM)
    with pytest.raises(PermissionError, match="ibv_get_device_list"):
        rdma.devices()


def test_device_removed_after_listing(world):
    world.set_device(1, is_gone=1)
    assert [info.name for info in rdma.devices()] == ["fake0", "fake2", "fake3"]
    with pytest.raises(OSError, match="ibv_open_device: fake1") as caught:
        rdma.open("fake1")
    assert caught.value.errno == errno.ENODEV


def test_device_removed_during_query(world):
    world.fail("ibv_query_port", errno.ENODEV, device="fake2")
    world.fail("ibv_query_device", errno.ENODEV, device="fake3")
    assert [info.name for info in rdma.devices()] == ["fake0", "fake1"]


@pytest.mark.parametrize("verb", ["ibv_open_device", "ibv_query_device", "ibv_query_port"])
def test_device_that_fails_queries_is_left_out(world, verb):
    world.fail(verb, errno.EACCES, device="fake1")
    assert [info.name for info in rdma.devices()] == ["fake0", "fake2", "fake3"]


def test_listing_fails_when_no_device_can_be_queried(world):
    world.set_device(0, is_gone=1)
    world.fail("ibv_open_device", errno.EACCES, device="fake1")
    world.fail("ibv_open_device", errno.EIO, device="fake2")
    world.fail("ibv_open_device", errno.EIO, device="fake3")
    with pytest.raises(PermissionError, match="ibv_open_device: fake1"):
        rdma.devices()


@pytest.mark.parametrize(
    "node_type, vendor_id, name, reason",
    [
        (4, 0x02C9, "RNIC", "iWARP: its queue pairs connect by rdma_cm alone"),
        (5, 0x1137, "usNIC", "node type usNIC: it has no RC queue pairs"),
        (6, 0x1137, "usNIC UDP", "node type usNIC UDP: it has no RC queue pairs"),
        (7, 0x1DA3, "unspecified", "node type unspecified: it has no RC queue pairs"),
        (7, 0x1D0F, "unspecified", "EFA: it has no RC queue pairs"),
        (1, 0x1D0F, "CA", "EFA: it has no RC queue pairs"),  # as its first drivers said
    ],
)
def test_unsupported_device_type_has_no_queue_pairs(world, node_type, vendor_id, name, reason):
    world.set_device(node_type=node_type, vendor_id=vendor_id)
    assert rdma.devices()[0].node_type == name
    with rdma.open("fake0") as device, device.register(bytearray(64)) as region:
        assert region.num_bytes == 64
        with device.completion_queue() as queue, pytest.raises(Unavailable) as refused:
            queue.queue_pair()
    assert str(refused.value) == f"queue_pair: fake0: {reason}"


@pytest.mark.parametrize("node_type, name", [(1, "CA"), (-1 & 0xFFFFFFFF, ""), (9, "")])
def test_unknown_device_type_is_tried(world, node_type, name):
    world.set_device(node_type=node_type)
    assert rdma.devices()[0].node_type == name
    with rdma.open("fake0") as device, device.completion_queue() as queue:
        assert queue.queue_pair().number


def test_unknown_device_name_is_rejected(world):
    with pytest.raises(InvalidArgument, match=r'\(fake0, fake1, fake2, fake3\), got "mlx5_0"'):
        rdma.open("mlx5_0")


@pytest.mark.parametrize(
    "verb",
    ["ibv_open_device", "ibv_alloc_pd", "ibv_query_device", "ibv_query_port"],
)
def test_failed_open_leaves_nothing_behind(world, verb):
    world.fail(verb, errno.EIO)
    with pytest.raises(OSError, match=f"{verb}: fake0") as caught:
        rdma.open("fake0")
    assert caught.value.errno == errno.EIO
    assert world.live() == {}


def test_port_reports_its_current_state(world, device):
    world.set_port(state="DOWN")
    assert device.port().state == "DOWN" and device.info.ports[0].state == "ACTIVE"
    with pytest.raises(InvalidArgument, match="port: number must be in 1 to 1, got 2"):
        device.port(2)
    world.fail("ibv_query_port", errno.EIO)
    with pytest.raises(OSError, match="ibv_query_port: fake0 port 1"):
        device.port()
    device.close()
    with pytest.raises(InvalidArgument, match="port: device fake0 must be open, but is closed"):
        device.port()


@pytest.mark.parametrize(
    ("gids", "chosen"),
    [
        ([("10.0.0.1", "RoCE v1"), (LINK_LOCAL, "RoCE v2"), (IPV6, "RoCE v2")], 2),
        ([(IPV6, "RoCE v2"), ("10.0.0.1", "RoCE v1"), ("10.0.0.1", "RoCE v2")], 2),
        ([(LINK_LOCAL, "RoCE v1"), ("10.0.0.1", "RoCE v1")], 1),
        ([("10.0.0.1", "RoCE v2"), ("10.0.0.2", "RoCE v2")], 0),
        ([("169.254.3.4", "RoCE v2"), ("10.0.0.2", "RoCE v2")], 1),
        ([("169.254.3.4", "RoCE v2"), (IPV6, "RoCE v2")], 1),
    ],
)
def test_most_widely_routable_gid_is_chosen(world, device, gids, chosen):
    for i, (gid, kind) in enumerate(gids):
        world.set_gid(i, gid if ":" in gid else f"::ffff:{gid}", kind)
    for i in range(len(gids), 2):
        world.set_gid(i, "::", "RoCE v1")
    with device.completion_queue() as queue, queue.queue_pair() as pair:
        text, kind = gids[chosen]
        assert text in str(pair.endpoint) and pair.endpoint.gid_type == kind


def test_port_without_gid_is_rejected(world, device):
    for i in range(2):
        world.set_gid(i, "::", "RoCE v1")
    with device.completion_queue() as queue:
        with pytest.raises(Unavailable, match=r"fake0 port 1 \(ACTIVE\) has no GID: is its netw"):
            queue.queue_pair()
