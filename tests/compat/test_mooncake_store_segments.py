"""Segments that are mounted and unmounted while a store over several hosts runs."""

import os
import subprocess
import tempfile
import threading
from pathlib import Path

import pytest

from mooncake_serving.compat.mooncake.store import (
    INTERNAL_ERROR,
    INVALID_PARAMS,
    OBJECT_NOT_FOUND,
    RPC_FAIL,
    MooncakeDistributedStore,
    ReplicateConfig,
    segments,
)
from mooncake_serving.store.cluster import node_server

from ..interrupts import CtrlC
from ..metadata.support import eventually, free_port
from ..transfer.scripts import PYTHON
from .store_processes import processes
from .store_support import Memory, reasons, set_up, settings_of, value_of
from .support import in_threads

pytest.importorskip("redis")
pytest.importorskip("msgspec")

MIB = 1 << 20
SIZE = 32 * MIB
NONE = {"ret": INVALID_PARAMS, "segment_ids": [], "allocated_size": 0}


@pytest.fixture(autouse=True)
def _closed_soon(monkeypatch):
    """Nodes notice their end at once."""
    monkeypatch.setattr(node_server, "POLL_S", 0.01)


@pytest.fixture
def store(server):
    """It has no pool, and is alone."""
    store = MooncakeDistributedStore()
    assert store.setup(settings_of(server.url, 0)) == 0
    yield store
    assert store.close() == 0


@pytest.fixture
def file():
    """Alone in a folder in memory."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = f"{folder}/segment"
        Path(path).touch()
        os.truncate(path, SIZE)
        yield path


def allocated(store: MooncakeDistributedStore, size: int = SIZE) -> str:
    answer = store.allocate_and_mount_segment(size)
    assert answer["ret"] == 0 and answer["allocated_size"] == size
    [name] = answer["segment_ids"]
    return name


def mounted(store: MooncakeDistributedStore, path: str, size: int = SIZE) -> str:
    answer = store.mount_segment(path, size)
    assert answer["ret"] == 0
    [name] = answer["segment_ids"]
    return name


def holders(store: MooncakeDistributedStore, key: str) -> list[str]:
    found = store.get_replica_desc(key)
    return [one.get_memory_descriptor().buffer_descriptor.transport_endpoint for one in found]


def members(store: MooncakeDistributedStore) -> set[str]:
    return {member.name for member in store._running().backend._directory.members()}


def test_allocated_segment_stores_values_until_unmounted(server, store):
    assert store.put("before", b"1") == RPC_FAIL
    name, memory = allocated(store), Memory(store)
    with processes(settings_of(server.url, 0)) as (other,):
        for i, num_bytes in enumerate((1, 4096, 300_000, 5 * MIB)):
            value = value_of(i, num_bytes)
            assert other.call("put", f"k{i}", value) == 0
            assert store.get(f"k{i}") == other.call("get", f"k{i}") == value
            assert holders(store, f"k{i}") == [name]
        assert store.put_from("mine", memory.address, 1000) == 0
        assert other.call("get", "mine") == memory.at(0, 1000)
        assert store.unmount_and_free_segment([name]) == 0
        assert name not in members(store)
        for ask in (lambda *args: other.call(*args), lambda n, *args: getattr(store, n)(*args)):
            assert ask("batch_is_exist", ["k0", "k3", "mine"]) == [0, 0, 0]
            assert ask("get", "k3") == b"" and ask("get_size", "mine") == OBJECT_NOT_FOUND
        assert store.put("after", b"1") == other.call("put", "after", b"1") == RPC_FAIL
        allocated(store)
        eventually(lambda: other.call("put", "after", b"2") == 0, "it does not see the segment")
        assert store.get("after") == b"2"


def test_sizes_are_rounded_up_as_in_mooncake(store):
    answer = store.allocate_and_mount_segment(16 * MIB + 1, "any", "any")
    assert answer["ret"] == 0 and answer["allocated_size"] == 32 * MIB
    assert store._running().backend._directory.members()[0].capacity_bytes in (0, 32 * MIB)


def test_values_stay_readable_for_the_grace_period(server, store):
    name = allocated(store)
    with processes(settings_of(server.url, 0)) as (other,):
        assert store.put("a", b"1") == 0
        assert store.unmount_and_free_segment([name], 1000) == 0
        assert store.get("a") == other.call("get", "a") == b"1"
        assert store.put("b", b"2") == other.call("put", "b", b"2") == RPC_FAIL
        assert store.unmount_and_free_segment([name]) == INVALID_PARAMS
        assert store.unmount_and_free_segment([name], 3) == INVALID_PARAMS
        assert name in members(store)


def test_values_are_gone_after_the_grace_period(server, store):
    name = allocated(store)
    with processes(settings_of(server.url, 0)) as (other,):
        assert store.put("a", b"1") == 0
        assert store.unmount_and_free_segment([name], 1) == 0
        eventually(
            lambda: store.unmount_and_free_segment([name]) == INTERNAL_ERROR, "it is still known"
        )
        assert name not in members(store)
        assert store.get("a") == other.call("get", "a") == b""


def test_mounted_file_is_overwritten_by_the_segment(store, file):
    Path(file).write_bytes(b"before" + bytes(SIZE - 6))
    name = mounted(store, file)
    value = value_of(0, 100_000)
    assert store.put("a", value) == 0 and holders(store, "a") == [name]
    bytes_there = Path(file).read_bytes()
    assert value in bytes_there and not bytes_there.startswith(b"before")
    assert store.unmount_segment([name], 0) == 0
    assert os.path.getsize(file) >= SIZE and store.is_exist("a") == 0
    [again] = store.mount_segment(file, 1000)["segment_ids"]
    assert store.unmount_segment([again]) == 0
    mounted(store, file)
    assert store.is_exist("a") == 0
    assert os.listdir(os.path.dirname(file)) == ["segment"]


@pytest.mark.parametrize(
    ("offset", "size", "code", "reason"),
    [
        (0, SIZE + 1, INTERNAL_ERROR, "bytes within the 33554432 of"),
        (2**64 - 4096, SIZE, INTERNAL_ERROR, "bytes within the 33554432 of"),
        (5, 4096, INTERNAL_ERROR, "offset and size must be whole pages"),
        (4096, 4096, INVALID_PARAMS, "offset must be 0"),
        (-1, 4096, INVALID_PARAMS, "offset must be an integer"),
        (0, "4096", INVALID_PARAMS, "size must be an integer"),
        (0, 1, INVALID_PARAMS, "capacity_bytes must be"),
    ],
)
def test_invalid_file_ranges_are_rejected(store, file, caplog, offset, size, code, reason):
    Path(file).write_bytes(bytes(SIZE))
    inode = os.stat(file).st_ino
    assert store.mount_segment(file, size, offset) == {"ret": code, "segment_ids": []}
    reasons(caplog, f"mount_segment: .*{reason}")
    assert os.stat(file).st_ino == inode and os.path.getsize(file) == SIZE


def test_invalid_files_are_rejected(store, file, tmp_path, caplog):
    for path, code in [
        (file + "-none", INTERNAL_ERROR),
        (str(tmp_path), INTERNAL_ERROR),
        ("/dev/null", INTERNAL_ERROR),
        ("", INVALID_PARAMS),
        (file + "\0", INVALID_PARAMS),
        ("\udcff", INVALID_PARAMS),
        (5, INVALID_PARAMS),
    ]:
        assert store.mount_segment(path, 4096) == {"ret": code, "segment_ids": []}, path
        reasons(caplog, "mount_segment: ")
    assert store.mount_segment(file, 0) == {"ret": 0, "segment_ids": []}


def test_invalid_arguments_are_rejected(store, file, caplog):
    for size in (-1, "1", 1.5, None, 1 << 50, 2**64 - 1):
        assert store.allocate_and_mount_segment(size) == NONE
        reasons(caplog, "allocate_and_mount_segment: ")
    assert store.allocate_and_mount_segment(0) == NONE | {"ret": INTERNAL_ERROR}
    assert store.allocate_and_mount_segment(SIZE, None) == NONE
    reasons(caplog, "protocol must be a string")
    assert store.mount_segment(file, SIZE, location=3)["ret"] == INVALID_PARAMS
    reasons(caplog, "location must be a string")
    for unmount in (store.unmount_segment, store.unmount_and_free_segment):
        assert unmount([]) == unmount(()) == 0
        for ids in ("a", None, 5, b"a", [5], [None], [[]]):
            assert unmount(ids) == INVALID_PARAMS
            reasons(caplog, f"{unmount.__name__}: segment_")
        for grace_s in (-1, 0.5, "1", 2**64):
            assert unmount([], grace_s) == INVALID_PARAMS
            reasons(caplog, "grace_period_seconds must be an integer")
        with pytest.raises(TypeError):
            unmount()
    with pytest.raises(TypeError):
        store.allocate_and_mount_segment()


def test_unknown_segments_are_skipped(store, file, caplog):
    one, two, three = allocated(store), allocated(store), mounted(store, file)
    assert store.unmount_segment([one]) == INTERNAL_ERROR
    reasons(caplog, "unmount_segment: segment_ids must be of .*, got '127")
    assert store.unmount_and_free_segment([three]) == INTERNAL_ERROR
    assert store.unmount_and_free_segment(["none", one, store.get_hostname()]) == INTERNAL_ERROR
    assert members(store) == {store.get_hostname(), two, three}
    assert store.unmount_segment([three], grace_period_seconds=0) == 0
    assert store.unmount_and_free_segment([two, one]) == INTERNAL_ERROR
    assert members(store) == {store.get_hostname()}


def test_a_segment_of_a_process_with_a_pool(server):
    """The process puts into its pool; the segment takes copies, and what others put."""
    store, client = MooncakeDistributedStore(), MooncakeDistributedStore()
    assert store.setup(settings_of(server.url, 16 * MIB)) == 0
    name = allocated(store)
    assert client.setup(settings_of(server.url, 0)) == 0
    assert store.put("mine", b"1") == 0 and holders(store, "mine") == [store.get_hostname()]
    assert client.put("theirs", b"2") == 0 and holders(store, "theirs") == [name]
    assert store.get("theirs") == b"2"
    assert store.put("both", b"3", ReplicateConfig(replica_num=2)) == 0
    assert set(holders(client, "both")) == {name, store.get_hostname()}
    assert store.batch_replica_clear(["both", "mine"], name) == ["both"]
    task, code = store.create_move_task("mine", store.get_hostname(), name)
    assert code == 0
    eventually(lambda: store.query_task(task)[0].status.name == "SUCCESS", "it does not move")
    assert holders(client, "mine") == [name] and client.get("mine") == b"1"
    assert store.unmount_and_free_segment([name]) == 0
    assert client.batch_is_exist(["mine", "theirs", "both"]) == [0, 0, 1]
    assert client.close() == store.close() == 0


def test_segments_with_a_metadata_server(server):
    store = MooncakeDistributedStore()
    own = f"127.0.0.1:{free_port()}"
    settings = settings_of(server.url, 0) | {"metadata_server": server.url, "local_hostname": own}
    assert store.setup(settings) == 0 and store.get_hostname() == own
    name = allocated(store)
    assert name != own and store.put("a", b"1") == 0
    assert holders(store, "a") == [name]
    assert store.unmount_and_free_segment([name]) == store.close() == 0


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_close_leaves_no_threads_files_or_members(server, file):
    threads, num_files = set(threading.enumerate()), []
    for _ in range(4):
        store = MooncakeDistributedStore()
        assert store.setup(settings_of(server.url, 0)) == 0
        names = [allocated(store) for _ in range(3)]
        mounted(store, file)
        assert store.put("a", bytes(MIB)) == 0 and len(store.get("a")) == MIB
        assert store.unmount_and_free_segment(names[:1]) == 0
        assert store.unmount_and_free_segment(names[1:2], 2**64 - 1) == 0
        assert store.unmount_and_free_segment(names[2:], 1000) == 0
        assert len(members(store)) == 4
        assert store.close() == 0
        eventually(lambda: set(threading.enumerate()) <= threads, "threads are left")
        num_files.append(num_open_files())
    assert num_files[-1] <= num_files[0], num_files
    other = MooncakeDistributedStore()
    assert other.setup(settings_of(server.url, 0)) == 0 and len(members(other)) == 1
    assert other.close() == 0


def test_mount_and_unmount_without_the_directory(server, store, caplog):
    name = allocated(store)
    threads, num_files = len(threading.enumerate()), num_open_files()
    server.stop()
    assert store.allocate_and_mount_segment(SIZE) == NONE | {"ret": RPC_FAIL}
    reasons(caplog, "allocate_and_mount_segment: ")
    eventually(lambda: len(threading.enumerate()) <= threads, "threads are left")
    assert num_open_files() <= num_files
    assert store.unmount_and_free_segment([name], 1000) == 0
    assert store.unmount_and_free_segment([name]) == INVALID_PARAMS
    server.start()
    eventually(lambda: store.allocate_and_mount_segment(SIZE)["ret"] == 0, "it does not come back")


def test_threads(server, store):
    """Values come and go with segments, and are right or not there."""
    allocated(store)
    value = value_of(0, 50_000)

    def run(number: int) -> None:
        for i in range(6):
            key = f"{number} {i}"
            name = allocated(store, 16 * MIB)
            assert store.put(key, value) == 0
            assert store.get(key) in (value, b"")
            assert store.unmount_and_free_segment([name], i % 2) == 0

    in_threads(3, run)
    assert store.put("after", value) == 0 and store.get("after") == value


def test_interrupt_at_any_bytecode_leaks_nothing(server, file):
    threads, num_files = set(threading.enumerate()), []
    count, is_left = 0, True
    while is_left:
        count += 7
        store = MooncakeDistributedStore()
        assert store.setup(settings_of(server.url, 0)) == 0
        try:
            with CtrlC(segments.__file__, count) as ctrl_c:
                [name] = store.mount_segment(file, SIZE)["segment_ids"]
                store.unmount_segment([name])
                [name] = store.allocate_and_mount_segment(SIZE)["segment_ids"]
                store.unmount_and_free_segment([name], 1000)
        except KeyboardInterrupt:
            os.truncate(file, SIZE)
        is_left = ctrl_c.has_come
        assert store.close() == 0
        eventually(lambda: set(threading.enumerate()) <= threads, "threads are left")
        num_files.append(num_open_files())
    assert count > 300 and max(num_files[10:]) <= max(num_files[:10])


FORKED = """
import os, sys
from mooncake_serving.compat.mooncake.store import MooncakeDistributedStore
store = MooncakeDistributedStore()
assert store.setup("127.0.0.1", "P2PHANDSHAKE", 0, 1 << 20, "tcp", "", sys.argv[1]) == 0
answer = store.allocate_and_mount_segment(1 << 24)
ids = answer["segment_ids"]
assert answer["ret"] == store.put("a", b"1") == store.unmount_and_free_segment(ids, 1000) == 0
pid = os.fork()
if pid:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert store.get("a") == b"1"
    sys.exit(code)
assert store.allocate_and_mount_segment(1 << 24)["ret"] == -600
assert store.mount_segment("/dev/null", 0)["ret"] == -600
assert store.unmount_segment([]) == store.unmount_and_free_segment(ids) == -600
assert store.unmount_local_disk_segment() == -600
assert store.close() == 0
"""


def test_a_forked_child_has_no_segments(server):
    """The parent has its own, and its end waits for no grace period."""
    command = [*PYTHON, "-c", FORKED, server.url]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr


def test_segment_calls_before_setup_are_rejected(store, caplog):
    closed = MooncakeDistributedStore()
    assert store.unmount_local_disk_segment(5) == 0
    assert closed.close() == 0
    assert closed.allocate_and_mount_segment(SIZE) == NONE
    reasons(caplog, "allocate_and_mount_segment: call setup first")
    assert closed.mount_segment("/dev/null", 0) == {"ret": INVALID_PARAMS, "segment_ids": []}
    assert closed.unmount_segment([]) == closed.unmount_and_free_segment([]) == INVALID_PARAMS
    assert closed.unmount_local_disk_segment() == INVALID_PARAMS


def test_single_host_pool_cannot_mount_segments(path, file, caplog):
    store = set_up(path)
    assert store.allocate_and_mount_segment(SIZE) == NONE
    reasons(caplog, "must be the URL of a directory .*a pool of one host keeps its size")
    assert store.mount_segment(file, SIZE) == {"ret": INVALID_PARAMS, "segment_ids": []}
    assert store.unmount_segment([]) == store.unmount_and_free_segment(["a"]) == INVALID_PARAMS
    assert store.unmount_local_disk_segment() == 0
    assert store.unmount_local_disk_segment(-1) == INVALID_PARAMS
    assert store.close() == 0


def test_ssd_cannot_be_unmounted_before_close(path, tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES", str(16 * MIB))
    monkeypatch.setenv("MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES", str(4 * MIB))
    store = set_up(path, 4 * MIB, enable_ssd_offload=True, ssd_offload_path=str(tmp_path))
    assert store.unmount_local_disk_segment() == INVALID_PARAMS
    reasons(caplog, "unmount_local_disk_segment: the SSD stays until close")
    assert store.put("a", b"1") == 0 and store.get("a") == b"1"
    assert store.close() == 0
