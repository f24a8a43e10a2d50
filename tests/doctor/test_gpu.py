"""Drivers, BAR1, and the two ways to register GPU memory."""

import gzip

import pytest

from mooncake_kernels.doctor import Here, Library, State

from .machine import GIB, OPEN, PROPRIETARY, gpu, nic

GPU = gpu(3)
PATH = f"/sys/bus/pci/devices/{GPU}"


def one(machine, check, state):
    """Return the one finding of a check that has the state."""
    (finding,) = [f for f in machine.findings(check) if f.state is state]
    return finding


def test_missing_driver_is_a_problem(machine):
    machine.remove("/proc/driver/nvidia")
    problems = [f for f in machine.findings("driver") if f.state is State.PROBLEM]
    assert [f.subject for f in problems] == [gpu(pair) for pair in range(8)]
    assert problems[0].fix.startswith("modprobe nvidia ")


def resolved(machine):
    """Where a GPU's files are: links of it have to be written there."""
    return machine.links[PATH]


@pytest.mark.parametrize("driver, state", [("nouveau", State.PROBLEM), ("vfio-pci", State.INFO)])
def test_foreign_driver_is_reported(machine, driver, state):
    machine.remove("/proc/driver/nvidia")
    machine.files[f"/sys/bus/pci/drivers/{driver}/bind"] = ""
    machine.links[f"{resolved(machine)}/driver"] = f"/sys/bus/pci/drivers/{driver}"
    finding = next(f for f in machine.findings("driver") if f.subject == GPU)
    assert finding.state is state and driver in finding.detail
    assert (finding.fix == "modprobe -r nouveau && modprobe nvidia") == (driver == "nouveau")


def test_small_bar1_is_a_warning(machine):
    machine.files[f"{resolved(machine)}/resource"] = (
        "0x92000000 0x92ffffff 0x40200\n0x300000000000 0x30000fffffff 0x14220c\n"
    )
    finding = one(machine, "bar1", State.WARNING)
    assert finding.subject == GPU
    assert finding.detail == "256 MiB of BAR1, should be all of the GPU's memory"
    assert GPU in finding.fix


def test_bar1_is_compared_with_gpu_memory(machine):
    machine.here = Here(gpu_memory_bytes={GPU: 141 * GIB, gpu(0): 80 * GIB})
    finding = one(machine, "bar1", State.WARNING)
    assert finding.subject == GPU
    assert finding.detail == "128 GiB of BAR1, must be the GPU's 141 GiB"


def test_missing_bar_regions_are_unknown(machine):
    machine.files[f"{resolved(machine)}/resource"] = "0x0 0x0 0x0\n"
    assert one(machine, "bar1", State.UNKNOWN).subject == GPU


def test_proprietary_modules_suffice_with_peermem(machine):
    machine.files["/proc/driver/nvidia/version"] = PROPRIETARY
    finding = one(machine, "dmabuf_driver", State.INFO)
    assert finding.detail == "535.129.03, proprietary kernel modules, must be the open ones"
    assert "nvidia-open" in finding.fix
    assert machine.bad() == []


@pytest.mark.parametrize(
    "change, check, detail",
    [
        ({"/proc/driver/nvidia/version": PROPRIETARY}, "dmabuf_driver", "535.129.03, proprietary"),
        ({"/proc/sys/kernel/osrelease": "5.11.22\n"}, "dmabuf_kernel", "must be 5.12 or later"),
        ({"/proc/sys/kernel/osrelease": "4.18.0-553.el8\n"}, "dmabuf_kernel", "must be 5.12"),
        ({"/boot/config-6.8.0-45-generic": "# nothing\n"}, "dmabuf_kernel", "is not set"),
        (None, "dmabuf_call", "has no ibv_reg_dmabuf_mr"),
    ],
)
def test_missing_dmabuf_and_peermem_are_reported(machine, change, check, detail):
    machine.remove("/proc/modules")
    machine.files |= change or {}
    if change is None:
        machine.here = Here(has_dmabuf_call=False, open_errors=machine.here.open_errors)
    bad = {finding.check: finding for finding in machine.bad()}
    assert set(bad) == {check, "peermem"}
    assert detail in bad[check].detail and bad[check].state is State.WARNING
    assert bad["peermem"].state is State.PROBLEM
    assert bad["peermem"].fix.startswith("modprobe nvidia_peermem")
    assert "EFAULT" in bad["peermem"].why


def test_missing_peermem_is_only_info_with_dmabuf(machine):
    machine.remove("/proc/modules")
    machine.remove("/boot")
    machine.files["/proc/config.gz"] = gzip.compress(b"CONFIG_DMA_SHARED_BUFFER=y\n")
    assert one(machine, "peermem", State.INFO).detail.startswith("not loaded; dma-buf")
    assert machine.bad() == []
    machine.files["/proc/config.gz"] = b"no archive"
    assert one(machine, "dmabuf_kernel", State.OK)


def test_libraries_required_by_the_hardware_are_problems(machine):
    missing = ("cuda_kernels", "torch_cuda", "cuda_driver", "libibverbs")
    rows = (*(Library(check, False, "gone") for check in missing),
            Library("packages", False, "not installed", "triton"))  # fmt: skip
    machine.here = Here(rows, has_dmabuf_call=True, open_errors=machine.here.open_errors)
    bad = {finding.check: finding for finding in machine.bad()}
    assert set(bad) == set(missing) and all(finding.fix for finding in bad.values())
    assert bad.pop("cuda_kernels").state is State.WARNING
    assert {finding.state for finding in bad.values()} == {State.PROBLEM}


@pytest.mark.parametrize("check", ["cuda_driver", "cuda_kernels"])
def test_build_without_cuda_suggests_a_rebuild(machine, check):
    """Where no driver is missing, none is to be installed."""
    machine.here = Here((Library(check, False, "built without cuda.h"),))
    [finding] = [f for f in machine.findings("libraries") if f.check == check]
    assert finding.fix == "install NVIDIA's CUDA toolkit, then, in the clone: pip install -e ."


def test_missing_optional_package_is_info(machine):
    machine.here = Here((Library("packages", False, "not installed", "triton"),))
    assert one(machine, "packages", State.INFO).fix == "pip install triton"


def test_missing_verbs_provider_is_a_warning(machine):
    machine.remove("/etc/libibverbs.d")
    findings = [f for f in machine.findings("verbs_provider") if f.state is State.WARNING]
    assert [f.subject for f in findings] == [f"mlx5_{pair}" for pair in range(8)]
    assert "provider mlx5" in findings[0].detail and "ibverbs-providers" in findings[0].fix


def test_driver_version_of_open_and_proprietary_modules(machine):
    assert "580.95.05, open" in one(machine, "driver", State.OK).detail
    machine.files["/proc/driver/nvidia/version"] = OPEN.replace("580.95.05  ", "")
    findings = machine.findings("driver")
    assert {finding.state for finding in findings} == {State.UNKNOWN}
    assert nic(0) not in {finding.subject for finding in findings}


def test_unknown_dmabuf_support_is_not_a_problem(machine):
    machine.remove("/proc/modules")
    machine.here = Here(open_errors=machine.here.open_errors)
    assert "is not known" in one(machine, "peermem", State.UNKNOWN).detail
    assert machine.bad() == []
