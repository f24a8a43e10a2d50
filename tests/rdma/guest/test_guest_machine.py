"""The guest is as the other tests expect: NICs on a PCIe tree with two nodes, and verbs."""

import ctypes
import os
import re
import subprocess
import time
from pathlib import Path

import pytest

from .support import c_object, pyverbs_or_skip

NICS = [f"rxe{i}" for i in range(4)]
SYS = Path("/sys/class/infiniband")


def pci(device: str) -> Path:
    """Return the PCI function of an RDMA device.

    rxe has no ``device`` of its own, as a real NIC has: ``parent`` names the network interface,
    whose device is virtio's, one below PCI's.
    """
    interface = (SYS / device / "parent").read_text().strip()
    return Path(f"/sys/class/net/{interface}/device").resolve().parent


def test_every_nic_has_an_active_port():
    assert sorted(os.listdir(SYS)) == NICS
    for device in NICS:
        assert (SYS / device / "ports/1/state").read_text().strip() == "4: ACTIVE"
        assert (SYS / device / "ports/1/rate").read_text().startswith("100 Gb/sec")


def test_nics_have_separate_root_ports_on_two_nodes():
    assert [(pci(device) / "numa_node").read_text().strip() for device in NICS] == list("0011")
    root_ports = {pci(device).parts[4] for device in NICS}
    host_bridges = {pci(device).parts[3] for device in NICS}
    assert len(root_ports) == 4 and len(host_bridges) == 2


def test_display_adapter_shares_the_first_nics_switch():
    for device in Path("/sys/bus/pci/devices").iterdir():
        if (device / "class").read_text().startswith("0x03"):
            assert device.resolve().parent.parent == pci("rxe0").parent.parent
            return
    pytest.fail("no display adapter")


def test_libibverbs_finds_every_device():
    verbs = ctypes.CDLL("libibverbs.so.1")
    verbs.ibv_get_device_list.restype = ctypes.c_void_p
    count = ctypes.c_int()
    assert verbs.ibv_get_device_list(ctypes.byref(count))
    assert count.value == len(NICS)


@pytest.mark.parametrize("client", NICS[1:])
def test_pingpong_with_the_first_nic(client):
    pingpong = ["ibv_rc_pingpong", "-g", "1", "-n", "100", "-d"]
    server = subprocess.Popen([*pingpong, "rxe0"], stdout=subprocess.DEVNULL)
    try:
        await_listener(18515)
        subprocess.run([*pingpong, client, "10.77.0.1"], check=True, timeout=60)
        assert server.wait(60) == 0
    finally:
        server.kill()
        server.wait()


def await_listener(port: int) -> None:
    """Wait until a process listens, by what the kernel says: a connection would be its first."""
    listening = re.compile(f":{port:04X} [0-9A-F:]+ 0A ")
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if any(listening.search(Path(f"/proc/net/{name}").read_text()) for name in ("tcp", "tcp6")):
            return
        time.sleep(0.02)
    pytest.fail(f"nobody listens on {port}")


def test_pyverbs_object_layout():
    device, pd = pyverbs_or_skip("device", "pd")
    context = device.Context(name="rxe1")
    domain = pd.PD(context)
    struct_pd = (ctypes.c_uint64 * 2).from_address(c_object(domain))
    assert struct_pd[0] == c_object(context)
    assert struct_pd[1] & 0xFFFFFFFF == domain.handle
