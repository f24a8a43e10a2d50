"""The fake CUDA driver (fake.h), and memory of its GPUs as Python objects."""

import ctypes
from pathlib import Path

import numpy as np

from ..rdma.fake.build import CUDA_INCLUDE, build_library

HERE = Path(__file__).parent
INVALID_VALUE, OUT_OF_MEMORY, ILLEGAL_ADDRESS = 1, 2, 700
OWNED = (
    "num_streams",
    "num_events",
    "num_pinned",
    "num_allocated",
    "num_imports",
    "num_retained",
)


def build_driver() -> Path | None:
    """Compile libcuda.so.1; None without CUDA's headers."""
    if not (CUDA_INCLUDE / "cudaTypedefs.h").is_file():
        return None
    flags = (f"-isystem{CUDA_INCLUDE}", "-pthread")
    return build_library("libcuda.so.1", sorted(HERE.glob("*.cc")), *flags)


class FakeGpuArray:
    """Looks like a cupy array from outside."""

    def __init__(
        self, library: ctypes.CDLL, address: int, num_bytes: int, device: int, stream: int = 0
    ):
        self._library = library
        self._stream = stream  # 0: its library does not say in which it works
        self.address = address
        self.num_bytes = num_bytes
        self.device = type("Device", (), {"id": device})()

    @property
    def __cuda_array_interface__(self) -> dict:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "version": 3,
            "stream": self._stream or None,
        }

    def part(self, begin: int, end: int) -> "FakeGpuArray":
        where = self.address + begin, end - begin, self.device.id
        return FakeGpuArray(self._library, *where, self._stream)

    def on(self, stream: "FakeStream") -> "FakeGpuArray":
        """The same memory, owned by a library that works in a stream."""
        where = self.address, self.num_bytes, self.device.id
        return FakeGpuArray(self._library, *where, stream.handle)

    @property
    def bytes(self) -> np.ndarray:
        """Its bytes as they are now: copies that were not waited for may be missing."""
        at = self._library.fake_bytes(ctypes.c_uint64(self.address))
        return np.frombuffer((ctypes.c_uint8 * self.num_bytes).from_address(at), np.uint8)


class FakeStream:
    """A stream of the program's; work after ``stall`` is not done before ``release``."""

    def __init__(self, library: ctypes.CDLL, handle: int):
        self._library = library
        self.handle = handle

    def stall(self) -> None:
        self._library.fake_gate(ctypes.c_void_p(self.handle))

    def release(self) -> None:
        self._library.fake_open(ctypes.c_void_p(self.handle))

    def copy(self, target: FakeGpuArray, source: FakeGpuArray) -> None:
        where = map(ctypes.c_uint64, (target.address, source.address, source.num_bytes))
        self._library.fake_copy(ctypes.c_void_p(self.handle), *where)

    def synchronize(self) -> None:
        """Wait until all in it is done."""
        self._library.fake_synchronize(ctypes.c_void_p(self.handle))

    def record(self) -> int:
        """The handle of an event recorded after the work in the stream."""
        return self._library.fake_record(ctypes.c_void_p(self.handle))

    def forget(self, event: int) -> None:
        """Destroy the event: its handle is no longer valid."""
        assert self._library.cuEventDestroy_v2(ctypes.c_void_p(event)) == 0

    def close(self) -> None:
        assert self._library.cuStreamDestroy_v2(ctypes.c_void_p(self.handle)) == 0


class FakeDriver:
    """Loads the library, which this process then takes for its CUDA driver."""

    def __init__(self):
        path = build_driver()
        assert path, "there is no cudaTypedefs.h to make up a driver with"
        self.library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        is_fake = hasattr(ctypes.CDLL("libcuda.so.1"), "fake_get")
        assert is_fake, f"the machine's driver is loaded already, set LD_PRELOAD={path}"
        for name in ("fake_allocate", "fake_bytes"):
            getattr(self.library, name).restype = ctypes.c_uint64
        for name in ("fake_stream", "fake_record"):
            getattr(self.library, name).restype = ctypes.c_void_p
        self.library.fake_get.restype = ctypes.c_int64

    def set(self, **values: int) -> None:
        for name, value in values.items():
            self.library.fake_set(name.encode(), ctypes.c_int64(value))

    def get(self, name: str) -> int:
        return self.library.fake_get(name.encode())

    def owned(self) -> dict[str, int]:
        """Counts of streams, events, pinned, allocated and opened memory, held contexts."""
        return {name: self.get(name) for name in OWNED}

    def fail(self, function: str, error: int, after: int = 0) -> None:
        """Let the call after so many successful ones return that error, once."""
        self.library.fake_fail(function.encode(), ctypes.c_int64(after), error)

    def allocate(self, num_bytes: int, *, device: int = 0, exportable: bool = True) -> FakeGpuArray:
        address = self.library.fake_allocate(device, ctypes.c_uint64(num_bytes), int(exportable))
        return FakeGpuArray(self.library, address, num_bytes, device)

    def stream(self) -> FakeStream:
        return FakeStream(self.library, self.library.fake_stream())

    def default_stream(self) -> FakeStream:
        """The legacy one."""
        return FakeStream(self.library, 0)
