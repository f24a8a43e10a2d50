"""PCIe links, ACS, the IOMMU and NUMA."""

import pytest

from mooncake_kernels.doctor import State

from .machine import bridges, gpu, nic, space

NIC, GPU = nic(3), gpu(3)


def of(machine, address, file):
    return f"{machine.links[f'/sys/bus/pci/devices/{address}']}/{file}"


def test_a_nic_that_came_up_narrow(machine):
    machine.files[of(machine, NIC, "current_link_width")] = "8\n"
    (finding,) = machine.bad()
    assert (finding.check, finding.state) == ("link", State.WARNING)
    assert finding.subject == f"mlx5_3 ({NIC})"
    assert finding.detail == "32 GT/s x8, must be 32 GT/s x16"
    assert f"setpci -s {bridges(3)[3]} CAP_EXP+10.w=20:20" in finding.fix


def test_a_nic_that_came_up_slow(machine):
    machine.files[of(machine, NIC, "current_link_speed")] = "8.0 GT/s PCIe\n"
    (finding,) = machine.bad()
    assert finding.detail == "8 GT/s x16, must be 32 GT/s x16"


def test_a_slot_that_has_no_more(machine):
    machine.files[of(machine, NIC, "current_link_speed")] = "16.0 GT/s PCIe\n"
    machine.files[of(machine, bridges(3)[3], "max_link_speed")] = "16.0 GT/s PCIe\n"
    (finding,) = machine.bad()
    assert "all that its slot has, the card can 32 GT/s x16" in finding.detail


def test_a_gpu_that_is_idle_slows_down(machine):
    machine.files[of(machine, GPU, "current_link_speed")] = "2.5 GT/s PCIe\n"
    assert machine.bad() == []
    (finding,) = [f for f in machine.findings("link") if f.state is State.INFO]
    assert finding.subject == f"GPU {GPU}" and GPU in finding.fix


def test_a_gpu_that_is_narrow_is_not_idle(machine):
    machine.files[of(machine, GPU, "current_link_width")] = "4\n"
    assert [finding.subject for finding in machine.bad()] == [f"GPU {GPU}"]


@pytest.mark.parametrize("width, speed", [("255", "32.0 GT/s PCIe"), ("16", "Unknown"), ("0", "")])
def test_a_link_that_is_not_told(machine, width, speed):
    machine.files[of(machine, NIC, "current_link_width")] = width
    machine.files[of(machine, NIC, "current_link_speed")] = speed
    (finding,) = [f for f in machine.findings("link") if f.state is State.UNKNOWN]
    assert NIC in finding.subject


def test_relaxed_ordering(machine):
    machine.files[of(machine, NIC, "config")] = space(device_control=0x2900)
    machine.files[of(machine, nic(4), "config")] = space()[:64]
    findings = {f.subject: f for f in machine.findings("relaxed_ordering")}
    off = findings[f"mlx5_3 ({NIC})"]
    assert off.state is State.INFO and off.fix == f"setpci -s {NIC} CAP_EXP+8.w=10:10"
    assert findings[f"mlx5_4 ({nic(4)})"].state is State.UNKNOWN
    assert findings[f"mlx5_2 ({nic(2)})"].state is State.OK


@pytest.mark.parametrize("control, names", [(0x1D, "ReqRedir CmpltRedir"), (0x20, "EgressCtrl")])
def test_acs_that_redirects(machine, control, names):
    bridge = bridges(3)[3]
    machine.files[of(machine, bridge, "config")] = space(acs=control)
    (finding,) = machine.bad()
    assert (finding.check, finding.subject, finding.state) == ("acs", bridge, State.WARNING)
    assert finding.detail == f"{names} on (ACS control {control:#06x}), above mlx5_3 ({NIC})"
    assert finding.fix.startswith(f"setpci -s {bridge} ECAP_ACS+6.w=0000")


def test_acs_that_only_validates_is_no_harm(machine):
    machine.files[of(machine, bridges(3)[0], "config")] = space(acs=0x01)
    assert machine.bad() == []


def test_acs_that_may_not_be_read(machine):
    for pair in range(8):
        for bridge in bridges(pair):
            machine.files[of(machine, bridge, "config")] = space()[:64]
    (finding,) = machine.findings("acs")
    assert finding.state is State.UNKNOWN and "32 bridges" in finding.detail
    assert finding.fix.startswith("sudo python -m mooncake_kernels doctor")


@pytest.mark.parametrize("at", [0x34, 0x41])
def test_a_list_of_capabilities_that_is_a_loop_ends(machine, at):
    data = bytearray(space())
    data[at] = 0x40
    data[0x60] = 0
    data[0x148:0x14C] = (0x0002 | 0x148 << 20).to_bytes(4, "little")
    machine.files[of(machine, NIC, "config")] = bytes(data)
    machine.files[of(machine, bridges(3)[0], "config")] = bytes(data)
    assert machine.bad() == []


def test_an_iommu_that_translates(machine):
    machine.files[f"/sys/kernel/iommu_groups/{NIC}/type"] = "DMA-FQ\n"
    (finding,) = machine.bad()
    assert (finding.check, finding.subject) == ("iommu", f"mlx5_3 ({NIC})")
    assert "DMA-FQ" in finding.detail and "iommu=pt" in finding.fix


@pytest.mark.parametrize(
    "cmdline, state", [("quiet iommu=pt", State.OK), ("intel_iommu=on", State.UNKNOWN)]
)
def test_an_iommu_of_an_old_kernel(machine, cmdline, state):
    machine.files["/proc/cmdline"] = cmdline
    machine.files[f"/sys/kernel/iommu_groups/{NIC}/devices"] = ""
    machine.remove(f"/sys/kernel/iommu_groups/{NIC}/type")
    findings = {f.subject: f.state for f in machine.findings("iommu")}
    assert findings[f"mlx5_3 ({NIC})"] is state


def test_no_iommu(machine):
    machine.remove("/sys/kernel/iommu_groups")
    assert {f.state for f in machine.findings("iommu")} == {State.OK}


def test_numa_balancing(machine):
    machine.files["/proc/sys/kernel/numa_balancing"] = "1\n"
    (finding,) = machine.bad()
    assert finding.check == "numa_balancing"
    assert finding.fix == "sysctl -w kernel.numa_balancing=0"


def test_a_nic_without_a_node(machine):
    machine.files[of(machine, NIC, "numa_node")] = "-1\n"
    (finding,) = machine.bad()
    assert (finding.check, finding.subject) == ("numa_node", f"mlx5_3 ({NIC})")
    assert f"> /sys/bus/pci/devices/{NIC}/numa_node" in finding.fix


def test_one_node_needs_no_names(machine):
    machine.remove("/sys/devices/system/node/node1")
    machine.files[of(machine, NIC, "numa_node")] = "-1\n"
    machine.files["/proc/sys/kernel/numa_balancing"] = "1\n"
    assert machine.bad() == []
