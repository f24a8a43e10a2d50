"""A protection domain that another library owns."""

import pytest

from mooncake_kernels import InvalidArgument, _host, rdma
from mooncake_kernels.rdma.device import Device


def test_borrowed_domain_is_closed_by_its_owner(world, domain):
    with Device(_host.rdma_borrow(*domain)) as device:
        assert device.name == "fake0" and rdma.probe(device, bytearray(10)) == ""
        region = device.register(bytearray(100))
        with pytest.raises(InvalidArgument, match="wait_event: fake0 must be opened here, but is"):
            device.wait_event()
    assert region.closed and world.calls("ibv_dealloc_pd") == 0


def test_borrow_fails_when_device_query_fails(world, domain):
    world.fail("ibv_query_device", 5)
    with pytest.raises(OSError, match="ibv_query_device: fake0"):
        _host.rdma_borrow(*domain)


@pytest.mark.parametrize("which", [0, 1])
def test_null(domain, which):
    handles = [*domain]
    handles[which] = 0
    with pytest.raises(InvalidArgument, match="context and pd must be handles of verbs, got null"):
        _host.rdma_borrow(*handles)


def test_non_pd_is_rejected(device):
    with pytest.raises(InvalidArgument, match="pd must be a pyverbs PD, got"):
        rdma.on_protection_domain(device)
