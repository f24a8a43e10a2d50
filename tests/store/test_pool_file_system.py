"""A pool's file belongs on a file system in memory: on another, whoever creates it is warned."""

import os

import pytest

from mooncake_kernels._machine_root import MachineRoot
from mooncake_kernels.pool import ObjectPool, object_pool
from mooncake_kernels.pool.values import file_system_of

UNIT = 4096


@pytest.mark.parametrize("kind", ["ext4", "tmpfs"])
def test_file_system_is_found_by_the_files_device(kind, tmp_path):
    device = os.stat(tmp_path).st_dev
    own = f"{os.major(device)}:{os.minor(device)}"
    table = tmp_path / "proc/self/mountinfo"
    table.parent.mkdir(parents=True)
    table.write_text(
        "21 20 4000:77 / /proc rw,nosuid - proc proc rw\n"
        f"25 20 {own} / /mnt rw,noatime shared:1 master:2 - {kind} /dev/some rw\n"
    )
    assert file_system_of(str(table), MachineRoot(tmp_path)) == kind
    assert file_system_of("/proc/self/stat", MachineRoot(tmp_path)) is None
    table.unlink()
    assert file_system_of(str(tmp_path), MachineRoot(tmp_path)) is None


def test_dev_shm():
    assert file_system_of("/dev/shm") == "tmpfs"


@pytest.mark.parametrize("kind, is_warned", [("ext4", True), ("tmpfs", False), (None, False)])
def test_creating_a_pool_on_a_disk_triggers_warning(kind, is_warned, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(object_pool, "file_system_of", lambda path: kind)
    with ObjectPool.create(16 * UNIT, tmp_path / "pool"), ObjectPool.open(tmp_path / "pool"):
        pass
    if is_warned:
        [record] = caplog.records
        assert f"{tmp_path / 'pool'} is on ext4, not in memory" in record.getMessage()
    else:
        assert not caplog.records


def test_unnamed_pool_triggers_no_warning(monkeypatch, caplog):
    monkeypatch.setattr(object_pool, "file_system_of", lambda path: "ext4")
    ObjectPool.create(16 * UNIT).close()
    assert not caplog.records
