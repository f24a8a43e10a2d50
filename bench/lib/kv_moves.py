"""One job moved in every way that is compared: by a plan, by torch, run by run, in one piece."""

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

import mooncake_kernels as mk
from lib.kv_shapes import Job

MAX_LOOP = 10_000  # of a Python loop over a GPU's runs: more would measure only Python
Call = Callable[[], Any]


class Move:
    """Runs of one pool into another one of the same layout.

    Args:
        job: what is moved.
        src, dst: bytes that the two pools are cut out of, on the host or a device.
        staging: bytes on the side of src and of dst, for torch's way; one tensor if both are on one
            side.
        engine, max_sms: of the plan.
    """

    def __init__(self, job: Job, src, dst, staging, engine="auto", max_sms=None):
        self.job, self.memory = job, (src, dst)
        src_tensors, dst_tensors = job.tensors(src), job.tensors(dst)
        views = (mk.KVView(tensors, job.shape.axes) for tensors in (src_tensors, dst_tensors))
        self.plan = mk.CopyPlan(*views)
        self.options = {"engine": engine, "max_sms": max_sms}
        # Engines keep floats in theirs. Bytes are moved 8 at a time here: torch's index_copy_ moves
        # an element at a time on the CPU, and is several times slower with small ones.
        dtype = job.shape.dtype if job.shape.dtype.itemsize > 1 else torch.int64
        self.src, self.dst = job.planes(src_tensors, dtype), job.planes(dst_tensors, dtype)
        self.src_ids, self.dst_ids = job.ids().to(src.device), job.ids().to(dst.device)
        device = src.device if src.is_cuda else dst.device
        self.plan_ids = self.src_ids.to(device), self.dst_ids.to(device)
        self.crosses = len(staging) > 1
        self.staging = [self._staged(memory, dtype) for memory in staging]
        self.on_cpu = device.type == "cpu"
        self.rows = self._addresses()

    def _staged(self, memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cut rows out of the staging memory: for all planes, or for one after another."""
        job = self.job
        num_planes = job.num_runs // job.num_ids if self.crosses else 1
        num_bytes = num_planes * job.num_ids * job.shape.run_bytes
        return memory[:num_bytes].view(dtype).view(num_planes, job.num_ids, -1)

    def _addresses(self) -> torch.Tensor:
        """Return where each run is to go and where it is, layer by layer: ``[runs, 2]``."""
        size, sides = self.job.shape.run_bytes, []
        for planes, ids in ((self.dst, self.dst_ids), (self.src, self.src_ids)):
            starts = torch.tensor([plane.data_ptr() for plane in planes])
            sides.append((starts[:, None] + ids.cpu() * size).flatten())
        return torch.stack(sides, dim=1)

    def ours(self) -> None:
        run = self.plan.run_slots if self.job.shape.by_slot else self.plan.run
        run(*self.plan_ids, **self.options)

    def by_torch(self) -> None:
        """What engines do without a kernel: index_select, copy_ between memories, index_copy_."""
        here, there = self.staging[0], self.staging[-1]
        for i, (src, dst) in enumerate(zip(self.src, self.dst, strict=True)):
            picked, landed = here[i % len(here)], there[i % len(there)]
            torch.index_select(src, 0, self.src_ids, out=picked)
            if self.crosses:
                landed.copy_(picked, non_blocking=True)
                if not dst.is_cuda:
                    continue
            dst.index_copy_(0, self.dst_ids, landed)
        if self.crosses and not self.dst[0].is_cuda:
            torch.cuda.current_stream().synchronize()  # the host reads what has arrived
            for dst, landed in zip(self.dst, there, strict=True):
                dst.index_copy_(0, self.dst_ids, landed)

    def memcpy(self) -> None:
        """Copy as many bytes in one piece."""
        one_piece(*self.memory, self.job.num_bytes)

    def run_by_run(self) -> None:
        """Call memcpy for each run; on a GPU the driver's, as vLLM's swap_blocks does."""
        size = self.job.shape.run_bytes
        if self.on_cpu:
            memcpy_loop()(self.rows.data_ptr(), len(self.rows), size)
            return
        stream = torch.cuda.current_stream().cuda_stream
        copy = driver_copy()
        for dst, src in self.listed_rows:
            if copy(dst, src, size, stream):
                raise RuntimeError("cuMemcpyAsync failed")

    @cached_property
    def listed_rows(self) -> list[list[int]]:
        return self.rows.tolist()

    def baselines(self) -> dict[str, Call]:
        calls: dict[str, Call] = {"torch": self.by_torch, "memcpy": self.memcpy}
        if shutil.which("cc") if self.on_cpu else len(self.rows) <= MAX_LOOP:
            calls["memcpy_loop"] = self.run_by_run
        return calls

    def check(self) -> None:
        """Run each way that moves runs into cleared memory, and check every byte."""
        ways = {"CopyPlan": self.ours, **self.baselines()}
        del ways["memcpy"]
        for name, call in ways.items():
            for plane in self.dst:
                plane.zero_()
            call()
            if self.memory[1].is_cuda or self.memory[0].is_cuda:
                torch.cuda.synchronize()
            for src, dst in zip(self.src, self.dst, strict=True):
                expected = torch.zeros_like(dst)
                picked = src[self.src_ids].to(dst.device)
                expected.view(torch.uint8)[self.dst_ids] = picked.view(torch.uint8)
                same = torch.equal(expected.view(torch.uint8), dst.view(torch.uint8))
                assert same, f"{name} is wrong for {self.job.name}: not timed"


def one_piece(src: torch.Tensor, dst: torch.Tensor, num_bytes: int) -> None:
    if src.is_cuda or dst.is_cuda:
        dst[:num_bytes].copy_(src[:num_bytes], non_blocking=True)
    else:
        ctypes.memmove(dst.data_ptr(), src.data_ptr(), num_bytes)


@cache
def memcpy_loop() -> Callable[[int, int, int], None]:
    """Return a loop of memcpy in C: one of ctypes.memmove would take 0.3 us a run."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "memcpy_loop.so"
        source = Path(__file__).parents[1] / "baselines/memcpy_loop.c"
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", source, "-o", library], check=True)
        loop = ctypes.CDLL(str(library)).memcpy_loop
    loop.argtypes, loop.restype = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64], None
    return loop


@cache
def driver_copy() -> Callable[..., int]:
    """Return the driver's cuMemcpyAsync, which cudaMemcpyAsync calls: torch has no such loop."""
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return copy
