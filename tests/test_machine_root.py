"""Files under a root: links stay within it, and an unreadable file counts as no answer."""

import pytest

from mooncake_kernels._machine_root import MachineRoot


@pytest.fixture
def root(tmp_path):
    (tmp_path / "sys/devices/pci0").mkdir(parents=True)
    (tmp_path / "sys/devices/pci0/numa_node").write_text("1\n")
    (tmp_path / "sys/devices/pci0/class").write_text("0x020700\n")
    (tmp_path / "sys/class").mkdir()
    (tmp_path / "sys/class/nic").symlink_to("../devices/pci0")
    (tmp_path / "sys/class/absolute").symlink_to("/sys/devices/pci0")
    (tmp_path / "sys/class/loop").symlink_to("loop")
    (tmp_path / "sys/class/gone").symlink_to("../devices/pci9")
    (tmp_path / "sys/class/out").symlink_to("../../../../../../etc")
    return MachineRoot(tmp_path)


def test_text_and_integer_files_are_read(root):
    assert root.text("/sys/devices/pci0/numa_node") == "1"
    assert root.integer("/sys/class/nic/numa_node") == 1
    assert root.integer("/sys/class/absolute/class") == 0x020700
    assert root.text("/sys/devices/pci0") is None  # a folder
    assert root.integer("/sys/none") is None


def test_links_are_followed_within_the_root(root):
    assert root.resolve("/sys/class/nic") == "/sys/devices/pci0"
    assert root.resolve("/sys/class/absolute/numa_node") == "/sys/devices/pci0/numa_node"
    assert root.resolve("/sys/class/./nic/../pci0/class") == "/sys/devices/pci0/class"
    assert root.resolve("/sys/class/out") is None  # the root's own /etc, which is not there
    assert root.resolve("/") == "/"


@pytest.mark.parametrize("name", ["loop", "gone", "loop/numa_node", "none"])
def test_broken_links_resolve_to_none(root, name):
    assert root.resolve(f"/sys/class/{name}") is None
    assert root.text(f"/sys/class/{name}") is None
    assert root.names(f"/sys/class/{name}") == []


def test_names_are_sorted(root):
    assert root.names("/sys/class") == ["absolute", "gone", "loop", "nic", "out"]
    assert root.names("/sys/devices/pci0/class") == []  # a file


def test_reads_this_machine():
    assert MachineRoot().integer("/proc/sys/kernel/pid_max") > 0


def test_impossible_file_names_resolve_to_none(root):
    for name in ("/sys/" + "a" * 300, "/sys/\0", "/sys/\ud800"):
        assert root.resolve(name) is None
        assert root.text(name) is None
