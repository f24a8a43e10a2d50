"""Machines without a fault, and machines without the hardware."""

import pytest

from mooncake_kernels.doctor import Finding, Here, State, examine
from mooncake_kernels.doctor.examine import CHECKS_OF, _run, topic_of

from .machine import Machine


def test_healthy_machine_has_no_findings(machine):
    findings = machine.findings()
    assert {finding.state for finding in findings} == {State.OK}
    names = {name for names in CHECKS_OF.values() for name in names}
    absent = {"rate", "pkey", "bond_mode", "bond_slave", "rdma_cm", "max_mr", "max_mr_size"}
    assert {finding.check for finding in findings} == names - absent


def test_empty_machine_has_no_problems(disk):
    findings = examine(Machine(disk).root(), Here())
    states = {finding.check: finding.state for finding in findings}
    assert not {State.PROBLEM, State.WARNING} & set(states.values())
    assert states["devices"] is states["driver"] is states["peermem"] is State.INFO
    assert states["memlock"] is states["shm"] is State.UNKNOWN
    assert "/proc/self/limits" in next(f.detail for f in findings if f.check == "memlock")


def test_gpus_without_nics_have_no_rdma_findings(machine):
    machine.remove("/sys/class/infiniband")
    machine.remove("/sys/class/infiniband_verbs")
    for pair in range(8):
        machine.remove(f"/sys/bus/pci/devices/0000:{pair}4:00.0")
    machine.files["/proc/self/limits"] = "Max locked memory  8388608  8388608  bytes\n"
    machine.files["/proc/driver/nvidia/version"] = "NVRM version: NVIDIA x Kernel Module  535.1  x"
    machine.remove("/proc/modules")
    assert machine.bad() == []


def test_check_names_are_unique():
    names = [name for names in CHECKS_OF.values() for name in names]
    assert len(set(names)) == len(names)
    assert set(names).isdisjoint(CHECKS_OF.keys() - {"mtu"})


def test_only_selected_checks_run(machine):
    assert {f.check for f in machine.findings("gpu", "memlock")} == {"driver", "bar1", "memlock"}


def test_check_that_raises_is_unknown():
    def check():
        yield Finding("memlock", "x", State.OK, "", None, "")
        raise KeyError("lost")

    (finding,) = _run("limits", check)
    assert finding.state is State.UNKNOWN
    assert finding.detail == "the check failed: KeyError: 'lost'"
    assert topic_of(finding) == "limits"


@pytest.mark.parametrize("value", ["[unset]", "", "12 13", "unlimited unlimited"])
def test_malformed_file_is_unknown(machine, value):
    machine.files["/proc/self/limits"] = value
    machine.files["/proc/sys/vm/max_map_count"] = value
    states = {f.check: f.state for f in machine.findings("limits")}
    assert states["memlock"] is states["nofile"] is states["max_map_count"] is State.UNKNOWN
