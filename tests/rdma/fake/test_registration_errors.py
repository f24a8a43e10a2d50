"""The meaning of a registration's errno on this machine."""

import ctypes
import errno
import mmap
import resource
from pathlib import Path

import numpy as np
import pytest

from mooncake_kernels import rdma
from mooncake_kernels.buffers import Buffer

PAGE = mmap.PAGESIZE
IPC_LOCK = 14
LIBC = ctypes.CDLL(None, use_errno=True)


class Mapped:
    """Pages of which some can be unmapped, or made read-only."""

    def __init__(self, num_pages: int):
        self.map = mmap.mmap(-1, num_pages * PAGE)
        self.array = np.frombuffer(self.map, np.uint8)
        self.address = self.array.ctypes.data
        self.num_bytes = num_pages * PAGE

    @property
    def buffer(self) -> Buffer:
        return Buffer(self.address, self.num_bytes, "cpu:0", True, self.array)

    def protect(self, page: int, rights: int) -> None:
        begin = ctypes.c_void_p(self.address + page * PAGE)
        assert LIBC.mprotect(begin, ctypes.c_size_t(PAGE), rights) == 0


def test_unmapped_memory_is_named(device):
    buffer = Buffer(1 << 20, 3 * PAGE, "cpu:0", True, None)
    with pytest.raises(OSError, match=r"0x100000 is not mapped in this process \(freed\?\)") as e:
        device.register(buffer)
    assert e.value.errno == errno.EFAULT
    assert f"ibv_reg_mr: {3 * PAGE} bytes at 0x100000 on fake0" in str(e.value)


def test_partially_unmapped_memory_is_named(device):
    memory = Mapped(4)
    hole = memory.address + 2 * PAGE
    try:
        assert LIBC.munmap(ctypes.c_void_p(hole), ctypes.c_size_t(PAGE)) == 0
        with pytest.raises(OSError, match=f"{hole:#x} is not mapped in this process"):
            device.register(memory.buffer)
    finally:
        LIBC.mmap.restype = ctypes.c_void_p
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10  # MAP_FIXED
        pages = ctypes.c_size_t(PAGE)
        LIBC.mmap(ctypes.c_void_p(hole), pages, mmap.PROT_READ, flags, -1, ctypes.c_size_t(0))


def test_read_only_mapping_is_named(device):
    memory = Mapped(3)
    memory.protect(1, mmap.PROT_READ)
    place = memory.address + PAGE
    with pytest.raises(OSError, match=f"{place:#x}.* may not be written by this process: register"):
        device.register(memory.buffer)
    buffer = Buffer(memory.address, memory.num_bytes, "cpu:0", False, memory)
    device.register(buffer, "remote_read").close()


def test_unreadable_memory_is_named(device):
    memory = Mapped(2)
    memory.protect(1, 0)
    try:
        with pytest.raises(OSError, match=f"{memory.address + PAGE:#x}.* may not be read by this"):
            device.register(memory.buffer)
    finally:
        memory.protect(1, mmap.PROT_READ | mmap.PROT_WRITE)


@pytest.fixture
def memlock():
    before = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_MEMLOCK, (limit, before[1]))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, before)


@pytest.fixture
def capability():
    """CAP_IPC_LOCK of this thread: yields how to set it."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this thread
    before = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; then the higher bits
    assert LIBC.capget(header, before) == 0

    def set_to(on: bool) -> None:
        if on and not before[1] >> IPC_LOCK & 1:
            pytest.skip("this process may not have CAP_IPC_LOCK")
        sets = (ctypes.c_uint32 * 6)(*before)
        sets[0] = before[0] & ~(1 << IPC_LOCK) | on << IPC_LOCK
        assert LIBC.capset(header, sets) == 0

    yield set_to
    assert LIBC.capset(header, before) == 0


def test_privileged_process_is_not_pointed_at_rlimit_memlock(world, device, memlock, capability):
    if Path("/proc/self/uid_map").read_text().split() != ["0", "0", str((1 << 32) - 1)]:
        pytest.skip("this process is in a user namespace of its own, where nobody is")
    capability(True)
    memlock(65536)
    world.set_option("max_pinned_bytes", 65536)
    with pytest.raises(OSError, match="out of memory to pin, or the device holds its .* regions"):
        device.register(bytearray(65537))


def test_rlimit_memlock_is_named(world, device, memlock, capability):
    capability(False)
    memlock(65536)
    world.set_option("max_pinned_bytes", 65536)
    with pytest.raises(OSError, match=r"may lock 65536 bytes of memory \(RLIMIT_MEMLOCK\): raise"):
        device.register(bytearray(65537))


def test_device_region_limit_is_named(world, memlock):
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] != resource.RLIM_INFINITY:
        pytest.skip("this process may not have an unlimited RLIMIT_MEMLOCK")
    memlock(resource.RLIM_INFINITY)
    world.set_device(max_mr=1)
    with rdma.open("fake0") as device, device.register(bytearray(10)):
        with pytest.raises(OSError, match="or the device holds its 1 regions already") as caught:
            device.register(bytearray(10))
        assert caught.value.errno == errno.ENOMEM


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (errno.EINVAL, "a region of the device has at most 18446744073709551615 bytes"),
        (errno.EFAULT, "mapped, but its pages cannot be pinned"),
        (errno.EIO, "100 bytes at 0x[0-9a-f]* on fake0: Input/output error"),
    ],
)
def test_other_kernel_errors_are_explained(world, device, error, message):
    world.fail("ibv_reg_mr_iova2", error)
    with pytest.raises(OSError, match=message) as caught:
        device.register(bytearray(100))
    assert caught.value.errno == error
