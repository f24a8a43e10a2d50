"""The fake libcufile (cufile.cc), and the functions by which tests control and inspect it."""

import ctypes
from pathlib import Path

from ..rdma.fake.build import CUDA_INCLUDE, build_library

HERE = Path(__file__).parent
NVIDIA_FS, P2PDMA = 1, 2  # by which a disk reaches a GPU
IO_NOT_SUPPORTED = -5008  # of cuFile, for a file


class FakeCuFile:
    """Loads the library as this process's libcufile; the driver is loaded already."""

    def __init__(self):
        flags = (f"-isystem{CUDA_INCLUDE}", f"-I{HERE.parents[1] / 'csrc'}", "-pthread")
        path = build_library("libcufile.so.0", [HERE / "cufile.cc"], *flags)
        self.library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
        for name in ("reads", "writes", "handles"):
            getattr(self.library, f"fake_cufile_{name}").restype = ctypes.c_int64
        # False if torch has loaded NVIDIA's: one with CUDA does.
        self.is_found = hasattr(ctypes.CDLL("libcufile.so.0"), "fake_cufile_reads")

    def set(self, way: int, most_bytes: int = 1 << 60) -> None:
        """How a disk reaches a GPU, 0: not at all; and what a call moves at most."""
        self.library.fake_cufile_set(way, ctypes.c_int64(most_bytes))

    def fail(self, result: int, *, after: int = 0, count: int = 1 << 60) -> None:
        """So many calls return that error (below -5000 cuFile's, else an errno), after others;
        with ``after`` -1 no file is accepted.
        """
        self.library.fake_cufile_fail(result, ctypes.c_int64(after), ctypes.c_int64(count))

    def num_reads(self) -> int:
        return self.library.fake_cufile_reads()

    def num_writes(self) -> int:
        return self.library.fake_cufile_writes()

    def num_handles(self) -> int:
        return self.library.fake_cufile_handles()
