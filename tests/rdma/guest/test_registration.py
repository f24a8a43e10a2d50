"""Host memory of every kind, and refusals: with the reason, and nothing leaked."""

import ctypes
import gc
import mmap
import os
import resource
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch

import mooncake_kernels as mk
from mooncake_kernels.buffers import Buffer

from .links import Link, noise


def file_mapping(tmp_path) -> mmap.mmap:
    path = tmp_path / "cache"
    path.write_bytes(bytes(8192))
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 8192)


def huge_pages(tmp_path) -> mmap.mmap:
    Path("/proc/sys/vm/nr_hugepages").write_text("4")
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | 0x40000  # MAP_HUGETLB
    return mmap.mmap(-1, 2 << 20, flags=flags)


BUFFERS = {
    "torch": lambda tmp_path: torch.zeros(8192, dtype=torch.uint8),
    "torch view": lambda tmp_path: torch.zeros(3, 4096, dtype=torch.bfloat16)[1],
    "torch shared": lambda tmp_path: torch.zeros(8192, dtype=torch.uint8).share_memory_(),
    "numpy": lambda tmp_path: np.zeros(8192, np.uint8),
    "bytearray": lambda tmp_path: bytearray(8192),
    "memoryview": lambda tmp_path: memoryview(bytearray(9000))[100:8292],
    "anonymous mapping": lambda tmp_path: mmap.mmap(-1, 8192),
    "file": file_mapping,
    "huge pages": huge_pages,
    "one byte": lambda tmp_path: bytearray(1),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_peer_writes_to_every_kind_of_memory(kind, tmp_path):
    buffer = BUFFERS[kind](tmp_path)
    with Link(num_bytes=2 << 20) as link:
        with link.b.device.register(buffer, "remote_write") as region:
            assert region.mapping == "host" and region.location == "cpu:0"
            size = region.num_bytes
            link.a.memory[:size] = noise(size)
            token = link.a.pair.write(
                link.a.region, region.remote, [(link.a.region.address, region.address, size)]
            )
            link.a.queue.wait(token)
        seen = ctypes.string_at(region.address, size)
        assert seen == link.a.memory[:size].tobytes()


def test_read_only_memory_can_be_read_by_peers():
    data = bytes(noise(5000))
    with Link() as link:
        region = link.b.device.register(data, "remote_read")
        rows = [(link.a.region.address, region.address, 5000)]
        link.a.queue.wait(link.a.pair.read(link.a.region, region.remote, rows))
        assert link.a.memory[:5000].tobytes() == data


def test_transfers_across_pieces():
    with Link() as link:
        target = np.zeros(100_000, np.uint8)[37:]
        region = link.b.device.register(target, "remote_read_write", max_piece_bytes=8192)
        assert len(region.pieces) in (13, 14)
        assert all(size <= 8192 for _, size, _, _ in region.pieces)
        with pytest.raises(mk.InvalidArgument, match="rkey: region must be of one piece"):
            _ = region.rkey
        link.a.memory[:] = noise(1 << 20)
        here, there = link.a.region.address, region.address
        rows = [(here + 11, there + 5, 50_000), (here + 70_000, there + 60_001, 39_000)]
        link.a.queue.wait(link.a.pair.write(link.a.region, region.remote, rows))
        assert (target[5:50_005] == link.a.memory[11:50_011]).all()
        assert (target[60_001:99_001] == link.a.memory[70_000:109_000]).all()
        back = link.a.pair.read(link.a.region, region.remote, [(here, there, len(target))])
        link.a.queue.wait(back)
        assert (link.a.memory[: len(target)] == target).all()


def made_up(address: int, num_bytes: int, writable: bool = True) -> Buffer:
    return Buffer(address, num_bytes, "cpu:0", writable, None)


def mapping_of(protection: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    arguments = ctypes.c_size_t(8192), protection, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return libc.mmap(None, *arguments, -1, ctypes.c_size_t(0))


def unmap(address: int) -> None:
    ctypes.CDLL(None).munmap(ctypes.c_void_p(address), ctypes.c_size_t(8192))


def test_freed_memory_is_rejected():
    address = mapping_of(mmap.PROT_READ | mmap.PROT_WRITE)
    unmap(address)
    with mk.rdma.open("rxe0") as device:
        with pytest.raises(OSError, match=f"{address:#x} is not mapped in this process") as error:
            device.register(made_up(address, 8192))
        assert error.value.errno == 14


def test_read_only_mapping_cannot_be_registered_for_write():
    address = mapping_of(mmap.PROT_READ)
    with mk.rdma.open("rxe0") as device:
        with pytest.raises(OSError, match="may not be written by this process"):
            device.register(made_up(address, 8192))
        device.register(made_up(address, 8192, writable=False), "remote_read").close()
    unmap(address)


def test_register_on_all_nics_or_none():
    address = mapping_of(mmap.PROT_READ | mmap.PROT_WRITE)
    unmap(address)
    opened = [mk.rdma.open(f"rxe{i}") for i in range(4)]
    before = num_regions()
    with pytest.raises(OSError, match="not mapped"):
        mk.rdma.register(opened, made_up(address, 8192))
    assert num_regions() == before
    memory = np.zeros(8192, np.uint8)
    regions = mk.rdma.register(opened, memory, "remote_read_write")
    assert [region.device.name for region in regions] == ["rxe0", "rxe1", "rxe2", "rxe3"]
    assert num_regions() == before + 4
    for device in opened:
        device.close()
    assert all(region.closed for region in regions) and num_regions() == before


def num_regions() -> int:
    """Of all devices, as the kernel counts them."""
    lines = os.popen("rdma resource show").read().splitlines()
    return sum(int(words[words.index("mr") + 1]) for words in map(str.split, lines))


def test_thousands_of_registrations_leak_nothing():
    memory = np.zeros(64 << 10, np.uint8)
    with mk.rdma.open("rxe1") as device:
        for _ in range(100):  # until what grows once has grown
            device.register(memory, "remote_read_write").close()
        gc.collect()
        files, size = len(os.listdir("/proc/self/fd")), resident_bytes()
        for _ in range(4000):
            device.register(memory, "remote_read_write").close()
        assert len(os.listdir("/proc/self/fd")) == files
        assert resident_bytes() - size < 4 << 20
        assert num_regions() == 0


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * mmap.PAGESIZE


def test_the_limit_of_locked_memory_is_named_forked():
    def attempt() -> None:
        drop_the_right_to_lock()
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))
        with mk.rdma.open("rxe0") as device:
            device.register(np.zeros(4096, np.uint8)).close()
            with pytest.raises(OSError, match=r"may lock 65536 bytes .*ulimit -l") as error:
                device.register(np.zeros(1 << 20, np.uint8))
            assert error.value.errno == 12

    assert in_a_child(attempt) == 0


def drop_the_right_to_lock() -> None:
    """CAP_IPC_LOCK, by which root locks what it likes."""
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, data) == 0
    data[0] &= ~(1 << 14)
    assert libc.capset(header, data) == 0


def in_a_child(run) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException:  # noqa: BLE001
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_forked_child_cannot_use_or_close_parents_objects():
    with Link() as link:
        link.a.memory[:] = noise(1 << 20)

        def attempt() -> None:
            with pytest.raises(mk.InvalidArgument, match="in the process that made it"):
                link.a.write(link.b, [(0, 0, 100)])
            link.close()

        assert in_a_child(attempt) == 0
        link.a.queue.wait(link.a.write(link.b, [(0, 0, 1 << 20)]))
        assert (link.a.memory == link.b.memory).all()


def test_device_memory_is_named_in_the_error():
    for function in sorted(os.listdir("/sys/bus/pci/devices")):
        with open(f"/sys/bus/pci/devices/{function}/class") as file:
            if file.read().startswith("0x0380"):
                break
    else:
        pytest.skip("the guest has no display adapter")
    with open(f"/sys/bus/pci/devices/{function}/resource0", "r+b", buffering=0) as file:
        bar = mmap.mmap(file.fileno(), 1 << 20)
    with mk.rdma.open("rxe0") as device, pytest.raises(OSError, match=r"device|pinned") as error:
        device.register(bar)
    assert error.value.errno == 14
