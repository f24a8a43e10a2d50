"""NVML's data is added to sysfs's; without NVML, and when it fails, sysfs suffices."""

import dataclasses
import sys
import types

import pytest

from mooncake_kernels.topology.nvml import with_nvml

from .support import as_sysfs_tells, machine


class NVMLError(Exception):
    pass


class FakeNvml(types.ModuleType):
    """NVML of a machine that shows the given GPUs, each with links to the given peers."""

    NVMLError = NVMLError

    def __init__(self, gpus, links, fails_at=""):
        super().__init__("pynvml")
        self.gpus, self.links, self.is_open = gpus, links, False
        self.fails_at = fails_at

    def nvmlInit(self):  # noqa: N802
        self._call("init")
        self.is_open = True

    def nvmlShutdown(self):  # noqa: N802
        self.is_open = False

    def nvmlDeviceGetCount(self):  # noqa: N802
        self._call("count")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetPciInfo(self, handle):  # noqa: N802
        return types.SimpleNamespace(busId=f"0000{self.gpus[handle].upper()}")

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return "NVIDIA H100"

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-{handle}".encode()  # as older releases of the package have it

    def nvmlDeviceGetNvLinkState(self, handle, link):  # noqa: N802
        if link >= len(self.links):
            raise NVMLError
        return self.links[link] is not None

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle, link):  # noqa: N802
        if not self.links[link]:
            raise NVMLError
        return types.SimpleNamespace(busId=f"0000{self.links[link].upper()}")

    def _call(self, name):
        if self.fails_at == name:
            raise NVMLError(f"{name} failed")


@pytest.fixture
def system():
    return as_sysfs_tells(machine("down-port").system)


def test_nvml_gives_order_names_and_links(system, monkeypatch):
    """NVML shows two of four GPUs, in an order of its own; three links go to switches."""
    shown = [system.gpus[2].pci, system.gpus[0].pci]
    links = [system.gpus[0].pci, "0000:07:00.0", None, "0000:08:00.0", ""]
    nvml = FakeNvml(shown, links)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    gpus = with_nvml(system).gpus
    assert [gpu.pci for gpu in gpus] == [*shown, system.gpus[1].pci, system.gpus[3].pci]
    assert [gpu.index for gpu in gpus] == [0, 1, 2, 3]
    assert (gpus[0].uuid, gpus[0].name) == ("GPU-0", "NVIDIA H100")
    assert gpus[0].nvlinks == ((system.gpus[0].pci, 1), ("nvswitch", 3))
    assert gpus[2].uuid == system.gpus[1].uuid  # from /proc
    assert not nvml.is_open


@pytest.mark.parametrize("fails_at", ["init", "count"])
def test_failing_nvml_falls_back_to_sysfs(system, monkeypatch, fails_at):
    nvml = FakeNvml([], [], fails_at)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert with_nvml(system) == system
    assert not nvml.is_open


def test_missing_pynvml_falls_back_to_sysfs(system, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert with_nvml(system) == system


def test_nvml_is_not_initialized_without_gpus(system, monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml([], [], "init"))
    nothing = dataclasses.replace(system, gpus=())
    assert with_nvml(nothing) is nothing


def test_pynvml_has_every_function_called():
    pynvml = pytest.importorskip("pynvml")
    for name in dir(FakeNvml):
        if name.lower().startswith("nvml"):
            assert hasattr(pynvml, name), name
