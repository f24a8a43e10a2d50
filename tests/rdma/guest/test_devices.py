"""The attributes that devices report, and what happens to them."""

import os
from pathlib import Path

import pytest

import mooncake_kernels as mk

from ...waiting import eventually
from .links import shell

SYS = Path("/sys/class/infiniband")


def test_devices_are_those_of_sysfs():
    devices = mk.rdma.devices()
    assert [device.name for device in devices] == sorted(os.listdir(SYS))
    for device in devices:
        (port,) = device.ports
        assert port.state == "ACTIVE" and port.link_layer == "Ethernet"
        assert port.rate_gbps == 100.0 and port.width == 4
        assert device.node_guid == (SYS / device.name / "node_guid").read_text().strip()
        gids = {gid.index: gid for gid in port.gids}
        for index, gid in gids.items():
            attrs = SYS / device.name / "ports/1/gid_attrs/types" / str(index)
            assert gid.type == attrs.read_text().strip()


def test_numa_node_and_pci_path_of_devices():
    devices = mk.rdma.devices()
    assert [device.numa for device in devices] == [0, 0, 1, 1]
    for device in devices:
        assert Path("/sys/bus/pci/devices", device.pci).resolve() == Path(device.pci_path)
    assert len({device.pci for device in devices}) == 4


def test_unknown_device_name_is_rejected():
    with pytest.raises(mk.InvalidArgument, match=r'rxe0, rxe1, rxe2, rxe3\), got "mlx5_0"'):
        mk.rdma.open("mlx5_0")


def test_the_ipv4_address_is_chosen():
    with mk.rdma.open("rxe2") as device:
        pair = device.completion_queue().queue_pair()
        assert str(pair.endpoint).endswith("at ::ffff:10.77.0.3")
        link_local = device.completion_queue().queue_pair(gid_index=0)
        assert "fe80::" in str(link_local.endpoint)
        with pytest.raises(mk.InvalidArgument, match="gid_index must be of a GID that is set"):
            device.completion_queue().queue_pair(gid_index=77)


def test_port_down_raises_an_event():
    with mk.rdma.open("rxe3") as device:
        assert device.wait_event() is None
        shell("ip link set eth3 down")
        try:
            events = [device.wait_event(10.0)]
            while events[-1] and events[-1].type != "PORT_ERR":
                events.append(device.wait_event(10.0))
            assert events[-1].port == 1
            assert device.port().state == "DOWN"
        finally:
            shell("ip link set eth3 up")
        eventually(lambda: device.port().state == "ACTIVE")


def test_device_limits_are_enforced():
    with mk.rdma.open("rxe0") as device:
        with pytest.raises(
            mk.InvalidArgument, match=f"depth must be in 1 to {device.info.max_cqe}"
        ):
            device.completion_queue(device.info.max_cqe + 1)
        queue = device.completion_queue(64)
        with pytest.raises(mk.InvalidArgument, match="max_sends must be in 1 to"):
            queue.queue_pair(max_sends=1 << 30)
        with pytest.raises(mk.InvalidArgument, match="room for 256 more work requests"):
            queue.queue_pair()
        held = queue.queue_pair(max_sends=60)
        with pytest.raises(mk.InvalidArgument, match="a depth of 64, 60 of it taken"):
            queue.queue_pair(max_sends=5)
        queue.queue_pair(max_sends=4)
        held.close()
        queue.queue_pair(max_sends=60)
