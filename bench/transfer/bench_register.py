"""Registering host memory: on one NIC, on all at once, and from the cache.

`register` is a registration and its end, against ibv_reg_mr and ibv_dereg_mr alone; `on 4 NICs`
against one NIC after the other; `lease` is the cache's, of memory already registered, against a
registration and its end. The memory has been touched before. Without RDMA NICs it runs in a guest
with soft-RoCE, whose processor is emulated: only ratios are worth reading.
"""

import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # bench/: lib and baselines

import mooncake_kernels as mk
from lib import in_guest
from lib.harness import Case, arguments
from lib.table import report
from mooncake_kernels.rdma import Device, RegistrationCache

NUM_NICS = 4
SIZES = (4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 2 << 30, 8 << 30)
QUICK_SIZES = (4 << 10, 1 << 20, 64 << 20)


class PlainVerbs:
    """libibverbs called through ctypes, on a protection domain of its own."""

    def __init__(self, name: str):
        self.verbs = verbs = ctypes.CDLL("libibverbs.so.1")
        for function in ("ibv_get_device_list", "ibv_open_device", "ibv_alloc_pd", "ibv_reg_mr"):
            getattr(verbs, function).restype = ctypes.c_void_p
        verbs.ibv_get_device_name.restype = ctypes.c_char_p
        count = ctypes.c_int()
        table = verbs.ibv_get_device_list(ctypes.byref(count))
        devices = (ctypes.c_void_p * count.value).from_address(table)
        names = [verbs.ibv_get_device_name(ctypes.c_void_p(device)) for device in devices]
        context = verbs.ibv_open_device(ctypes.c_void_p(devices[names.index(name.encode())]))
        self.pd = verbs.ibv_alloc_pd(ctypes.c_void_p(context))

    def register(self, memory: np.ndarray) -> None:
        arguments = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(memory.nbytes), 7
        mr = self.verbs.ibv_reg_mr(ctypes.c_void_p(self.pd), *arguments)
        assert mr, "ibv_reg_mr failed"
        assert self.verbs.ibv_dereg_mr(ctypes.c_void_p(mr)) == 0


def text(size: int) -> str:
    unit, shift = next((u, s) for u, s in (("GiB", 30), ("MiB", 20), ("KiB", 10)) if size >> s)
    return f"{size >> shift} {unit}"


def cases(devices: list[Device], sizes: tuple[int, ...]) -> Iterator[Case]:
    plain = PlainVerbs(devices[0].name)
    for size in sizes:
        memory = np.ones(size, np.uint8)
        cache = RegistrationCache(devices[:1])

        def one(memory: np.ndarray = memory) -> None:
            devices[0].register(memory, "remote_read_write").close()

        def at_once(memory: np.ndarray = memory) -> None:
            for region in mk.rdma.register(devices, memory, "remote_read_write"):
                region.close()

        def in_turn(memory: np.ndarray = memory) -> None:
            for region in [d.register(memory, "remote_read_write") for d in devices]:
                region.close()

        def lease(memory: np.ndarray = memory, cache: RegistrationCache = cache) -> None:
            cache.lease(memory).close()

        def check(memory: np.ndarray = memory) -> None:
            regions = mk.rdma.register(devices, memory, "remote_read_write")
            assert [region.num_bytes for region in regions] == [memory.nbytes] * len(devices)
            for region in regions:
                region.close()

        verbs = {"ibv_reg_mr": lambda memory=memory: plain.register(memory)}
        yield Case(f"register, {text(size)}", one, verbs, check)
        yield Case(f"on {len(devices)} NICs, {text(size)}", at_once, {"in turn": in_turn}, check)
        yield Case(f"lease, {text(size)}", lease, {"register": one}, check)
        cache.close()


if __name__ == "__main__":
    options = arguments(__doc__, without=("device",))
    in_guest.leave_unless_nics(options, NUM_NICS, memory_mb=2048 if options.quick else 12_000)
    devices = [mk.rdma.open(device.name) for device in mk.rdma.devices()[:NUM_NICS]]
    report("register", cases(devices, QUICK_SIZES if options.quick else SIZES), options)
