"""One job moved in every way that is compared: by a plan, by torch, run by run, in one piece."""

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from kv_shapes import Job

import mooncake_kernels as mk

MAX_LOOP = 10_000  # a loop in Python over more would only show Python
Call = Callable[[], Any]


class Move:
    """Runs of one pool into another one of the same layout.

    Args:
        job: what is moved.
        src, dst: bytes that the two pools are cut out of, on the host or a device.
        staging: bytes beside src and beside dst, for torch's way; one tensor if both are on one
            side.
        engine, max_sms: of the plan.
    """

    def __init__(self, job: Job, src, dst, staging, engine="auto", max_sms=None):
        self.job, self.memory = job, (src, dst)
        src_tensors, dst_tensors = job.tensors(src), job.tensors(dst)
        views = (mk.KVView(tensors, job.shape.axes) for tensors in (src_tensors, dst_tensors))
        self.plan = mk.CopyPlan(*views)
        self.options = {"engine": engine, "max_sms": max_sms}
        # Engines keep floats in theirs. Bytes are moved by eight here: torch's index_copy_ takes
        # an element at a time on the CPU, and is several times slower with small ones.
        dtype = job.shape.dtype if job.shape.dtype.itemsize > 1 else torch.int64
        self.src, self.dst = job.planes(src_tensors, dtype), job.planes(dst_tensors, dtype)
        self.src_ids, self.dst_ids = job.ids().to(src.device), job.ids().to(dst.device)
        device = src.device if src.is_cuda else dst.device
        self.plan_ids = self.src_ids.to(device), self.dst_ids.to(device)
        self.crosses = len(staging) > 1
        self.staging = [self._staged(memory, dtype) for memory in staging]
        self.rows: list[tuple[int, int]] = []
        if src.is_cuda or dst.is_cuda:
            self.rows = self._addresses()

    def _staged(self, memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Cut rows out of the staging memory: for all planes, or for one of them after another."""
        job = self.job
        num_planes = job.num_runs // job.num_ids if self.crosses else 1
        num_bytes = num_planes * job.num_ids * job.shape.run_bytes
        return memory[:num_bytes].view(dtype).view(num_planes, job.num_ids, -1)

    def _addresses(self) -> list[tuple[int, int]]:
        """Return where each run is to go and where it is, if they are few enough for a loop."""
        if self.job.num_runs > MAX_LOOP:
            return []
        size, sides = self.job.shape.run_bytes, []
        for planes, ids in ((self.dst, self.dst_ids.tolist()), (self.src, self.src_ids.tolist())):
            sides.append([plane.data_ptr() + i * size for plane in planes for i in ids])
        return list(zip(*sides, strict=True))

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
            torch.cuda.current_stream().synchronize()  # the host reads what has landed
            for dst, landed in zip(self.dst, there, strict=True):
                dst.index_copy_(0, self.dst_ids, landed)

    def memcpy(self) -> None:
        """Copy as many bytes in one piece."""
        one_piece(*self.memory, self.job.num_bytes)

    def run_by_run(self) -> None:
        """What vLLM's swap_blocks does: one call of the driver for each run."""
        stream = torch.cuda.current_stream().cuda_stream
        copy, size = driver_copy(), self.job.shape.run_bytes
        for dst, src in self.rows:
            if copy(dst, src, size, stream):
                raise RuntimeError("cuMemcpyAsync failed")

    def baselines(self) -> dict[str, Call]:
        calls: dict[str, Call] = {"torch": self.by_torch, "memcpy": self.memcpy}
        if self.rows:
            calls["memcpy_loop"] = self.run_by_run
        return calls

    def check(self) -> None:
        """Run each way that moves runs into cleared memory, and look at every byte."""
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
def driver_copy() -> Callable[..., int]:
    """Return the driver's cuMemcpyAsync, which cudaMemcpyAsync calls: torch has no such loop."""
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyAsync
    copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return copy
