"""PCIe links, ACS, the IOMMU and NUMA."""

import pytest

from mooncake_kernels.doctor import State

from .machine import bridges, gpu, nic, space

NIC, GPU = nic(3), gpu(3)


def of(machine, address, file):
    return f"{machine.links[f'/sys/bus/pci/devices/{address}']}/{file}"


def test_narrow_nic_link_is_a_warning(machine):
    machine.files[of(machine, NIC, "current_link_width")] = "8\n"
    (finding,) = machine.bad()
    assert (finding.check, finding.state) == ("link", State.WARNING)
    assert finding.subject == f"mlx5_3 ({NIC})"
    assert finding.detail == "32 GT/s x8, must be 32 GT/s x16"
    assert f"setpci -s {bridges(3)[3]} CAP_EXP+10.w=20:20" in finding.fix


def test_slow_nic_link_is_a_warning(machine):
    machine.files[of(machine, NIC, "current_link_speed")] = "8.0 GT/s PCIe\n"
    (finding,) = machine.bad()
    assert finding.detail == "8 GT/s x16, must be 32 GT/s x16"


def test_link_limited_by_its_slot_is_reported_as_such(machine):
    machine.files[of(machine, NIC, "current_link_speed")] = "16.0 GT/s PCIe\n"
    machine.files[of(machine, bridges(3)[3], "max_link_speed")] = "16.0 GT/s PCIe\n"
    (finding,) = machine.bad()
    assert "all that its slot has, the card can 32 GT/s x16" in finding.detail


def test_slow_link_of_an_idle_gpu_is_only_info(machine):
    machine.files[of(machine, GPU, "current_link_speed")] = "2.5 GT/s PCIe\n"
    assert machine.bad() == []
    (finding,) = [f for f in machine.findings("link") if f.state is State.INFO]
    assert finding.subject == f"GPU {GPU}" and GPU in finding.fix


def test_narrow_gpu_link_is_a_warning(machine):
    machine.files[of(machine, GPU, "current_link_width")] = "4\n"
    assert [finding.subject for finding in machine.bad()] == [f"GPU {GPU}"]


@pytest.mark.parametrize("width, speed", [("255", "32.0 GT/s PCIe"), ("16", "Unknown"), ("0", "")])
def test_unreadable_link_is_unknown(machine, width, speed):
    machine.files[of(machine, NIC, "current_link_width")] = width
    machine.files[of(machine, NIC, "current_link_speed")] = speed
    (finding,) = [f for f in machine.findings("link") if f.state is State.UNKNOWN]
    assert NIC in finding.subject


def test_relaxed_ordering_is_read_from_config_space(machine):
    machine.files[of(machine, NIC, "config")] = space(device_control=0x2900)
    machine.files[of(machine, nic(4), "config")] = space()[:64]
    findings = {f.subject: f for f in machine.findings("relaxed_ordering")}
    off = findings[f"mlx5_3 ({NIC})"]
    assert off.state is State.INFO and off.fix == f"setpci -s {NIC} CAP_EXP+8.w=10:10"
    assert findings[f"mlx5_4 ({nic(4)})"].state is State.UNKNOWN
    assert findings[f"mlx5_2 ({nic(2)})"].state is State.OK


@pytest.mark.parametrize("control, names", [(0x1D, "ReqRedir CmpltRedir"), (0x20, "EgressCtrl")])
def test_acs_redirection_is_a_warning(machine, control, names):
    bridge = bridges(3)[3]
    machine.files[of(machine, bridge, "config")] = space(acs=control)
    (finding,) = machine.bad()
    assert (finding.check, finding.subject, finding.state) == ("acs", bridge, State.WARNING)
    assert finding.detail == f"{names} on (ACS control {control:#06x}), above mlx5_3 ({NIC})"
    assert finding.fix.startswith(f"setpci -s {bridge} ECAP_ACS+6.w=0000")


def test_acs_source_validation_alone_is_accepted(machine):
    machine.files[of(machine, bridges(3)[0], "config")] = space(acs=0x01)
    assert machine.bad() == []


def test_unreadable_acs_is_unknown_and_suggests_sudo(machine):
    for pair in range(8):
        for bridge in bridges(pair):
            machine.files[of(machine, bridge, "config")] = space()[:64]
    (finding,) = machine.findings("acs")
    assert finding.state is State.UNKNOWN and "32 bridges" in finding.detail
    assert finding.fix.startswith("sudo python -m mooncake_kernels doctor")


@pytest.mark.parametrize("at", [0x34, 0x41])
def test_capability_list_cycle_terminates(machine, at):
    data = bytearray(space())
    data[at] = 0x40
    data[0x60] = 0
    data[0x148:0x14C] = (0x0002 | 0x148 << 20).to_bytes(4, "little")
    machine.files[of(machine, NIC, "config")] = bytes(data)
    machine.files[of(machine, bridges(3)[0], "config")] = bytes(data)
    assert machine.bad() == []


def test_translating_iommu_is_a_warning(machine):
    machine.files[f"/sys/kernel/iommu_groups/{NIC}/type"] = "DMA-FQ\n"
    (finding,) = machine.bad()
    assert (finding.check, finding.subject) == ("iommu", f"mlx5_3 ({NIC})")
    assert "DMA-FQ" in finding.detail and "iommu=pt" in finding.fix


@pytest.mark.parametrize(
    "cmdline, state", [("quiet iommu=pt", State.OK), ("intel_iommu=on", State.UNKNOWN)]
)
def test_iommu_mode_on_old_kernels_comes_from_the_command_line(machine, cmdline, state):
    machine.files["/proc/cmdline"] = cmdline
    machine.files[f"/sys/kernel/iommu_groups/{NIC}/devices"] = ""
    machine.remove(f"/sys/kernel/iommu_groups/{NIC}/type")
    findings = {f.subject: f.state for f in machine.findings("iommu")}
    assert findings[f"mlx5_3 ({NIC})"] is state


def test_absent_iommu_is_ok(machine):
    machine.remove("/sys/kernel/iommu_groups")
    assert {f.state for f in machine.findings("iommu")} == {State.OK}


def test_numa_balancing_is_reported(machine):
    machine.files["/proc/sys/kernel/numa_balancing"] = "1\n"
    (finding,) = machine.bad()
    assert finding.check == "numa_balancing"
    assert finding.fix == "sysctl -w kernel.numa_balancing=0"


def test_nic_without_a_numa_node_is_reported(machine):
    machine.files[of(machine, NIC, "numa_node")] = "-1\n"
    (finding,) = machine.bad()
    assert (finding.check, finding.subject) == ("numa_node", f"mlx5_3 ({NIC})")
    assert f"> /sys/bus/pci/devices/{NIC}/numa_node" in finding.fix


def test_numa_checks_are_skipped_on_a_single_node(machine):
    machine.remove("/sys/devices/system/node/node1")
    machine.files[of(machine, NIC, "numa_node")] = "-1\n"
    machine.files["/proc/sys/kernel/numa_balancing"] = "1\n"
    assert machine.bad() == []
