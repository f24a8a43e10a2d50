"""A NIC that vanishes. Runs last (conftest.py): the guest has one less afterwards."""

import errno
import threading
from pathlib import Path

import pytest

import mooncake_kernels as mk

from ...waiting import eventually
from .links import FAST, Link


def test_hot_removed_nic():
    with Link("rxe1", "rxe3") as link:
        link.connect(**FAST)
        function = mk.rdma.devices()[3].pci
        # soft-RoCE goes when nobody has it open any more: who removes it waits for us.
        removal = threading.Thread(
            target=Path(f"/sys/bus/pci/devices/{function}/remove").write_text, args=("1",)
        )
        removal.start()
        eventually(lambda: is_gone(link.b.device))
        with pytest.raises(mk.TransferError):
            link.a.queue.wait(link.a.write(link.b, [(0, 0, 1 << 20)]), timeout_s=60.0)
        with pytest.raises((mk.TransferError, OSError)):
            link.b.queue.wait(link.b.write(link.a, [(0, 0, 100)]), timeout_s=60.0)
    removal.join(60.0)
    assert not removal.is_alive()
    eventually(lambda: [d.name for d in mk.rdma.devices()] == ["rxe0", "rxe1", "rxe2"])
    with pytest.raises(mk.InvalidArgument, match='got "rxe3"'):
        mk.rdma.open("rxe3")


def is_gone(device: mk.rdma.Device) -> bool:
    try:
        device.port()
    except OSError as error:
        return error.errno == errno.ENODEV
    return False
