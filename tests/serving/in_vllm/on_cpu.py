"""What vLLM's connectors expect of a GPU, on a CPU: a plugin of vLLM's, for these tests alone.

vLLM calls ``register`` in every process of an engine. The rest of vLLM runs as it is.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class Event:
    """A CUDA event without CUDA: on a CPU, work has ended when the call that does it returns."""

    def __init__(self, *_args: Any, **_options: Any): ...

    def record(self, *_args: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait(self, *_args: Any) -> None: ...

    def query(self) -> bool:
        return True


def register() -> None:
    """Stand in for what vLLM's connectors for Mooncake call; log what this project says; and have
    an engine's processes forked, as on GPUs, so that they need not import vLLM again.
    """
    ours = logging.getLogger("mooncake_serving")
    if not ours.handlers:
        ours.addHandler(logging.StreamHandler())
        ours.setLevel(logging.INFO)
    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
        torch.cuda.Event = Event
    update = CpuPlatform.check_and_update_config.__func__

    def update_and_fork(cls: Any, config: Any) -> None:
        update(cls, config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = classmethod(update_and_fork)


class CpuTieringSpec(TieringOffloadingSpec):
    """Tiers behind vLLM's memory on the host; its own spec refuses CPUs."""

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = Worker(kv_caches, region)
        return self._worker


class Worker(OffloadingWorker):
    """Copies blocks of one token group, a block a chunk."""

    def __init__(self, kv_caches: CanonicalKVCaches, region: SharedOffloadRegion):
        self._region = region
        self._finished: list[TransferResult] = []
        self._caches = [
            (one.tensor.view(torch.int8).view(-1, one.page_size_bytes),
             region.create_next_worker_view(one.page_size_bytes))
            for one in kv_caches.tensors
        ]  # fmt: skip

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec.block_ids, dst_spec.chunk_ids, 0)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec.chunk_ids, dst_spec.block_ids, 1)

    def _copy(
        self, job_id: int, sources: Sequence[int], targets: Sequence[int], from_: int
    ) -> bool:
        for pair in self._caches:
            pair[1 - from_][list(targets)] = pair[from_][list(sources)]
        self._finished.append(TransferResult(job_id, True))
        return True

    def get_finished(self) -> list[TransferResult]:
        finished, self._finished = self._finished, []
        return finished

    def wait(self, job_ids: set[int]) -> None:
        """Return: a copy has ended when it was submitted."""

    def shutdown(self) -> None:
        self._caches.clear()
        self._region.cleanup()
