"""``StoreTier``: the store as a secondary tier of vLLM's KV offloading.

::

    vllm serve MODEL --kv-transfer-config '{
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": 8589934592,
            "secondary_tiers": [{
                "type": "StoreTier",
                "module_path": "mooncake_serving.connectors.vllm.tier",
                "url": "shm:/dev/shm/kv?size=64GiB"}]}}'

vLLM copies between GPUs and its own memory on the host, for all workers and kinds of caches; this
copies chunks between that memory and a store, which other engines share. docs/serving/engines.md.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import vllm
from vllm.platforms import current_platform
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from mooncake_kernels.errors import InvalidArgument, shown

from ..store_url import parse_store_url
from ..tier_store import TierStore, namespace_of
from .hit_sources import HIT_SOURCES

log = logging.getLogger("mooncake_serving.connectors.vllm")

NUM_THREADS = 2
MAX_THREADS = 64


class StoreTier(SecondaryTierManager):  # type: ignore[misc]  # vLLM is not there
    """A secondary tier in the store that a URL names. Nothing here blocks vLLM's scheduler: threads
    copy, and where a lookup asks another host, a thread looks up as well.

    A chunk is an object under vLLM's own key, in a namespace of all else that chunks depend on and
    vLLM tells a tier, see ``_namespace``. What the store cannot do is a miss, or a chunk that is
    not stored, and logged once of each kind.

    Args:
        offloading_spec: of vLLM.
        primary_kv_view: vLLM's memory on the host, ``[chunks, bytes of a chunk]``.
        tier_type: what vLLM calls this class.
        backpressure_detector: of vLLM.
        url: of the store, see ``open_store``.
        namespace: engines with different ones do not share chunks.
        num_threads: that copy.
        locality: "LOCAL" or "REMOTE", for vLLM's filters of tiers.

    Raises:
        InvalidArgument: an option is unknown or wrong, or a chunk is larger than the store.
        OSError, Unavailable: as ``open_store``.
    """

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,
        *,
        url: str = "",
        namespace: str = "",
        num_threads: int = NUM_THREADS,
        locality: str | None = None,
        **unknown: Any,
    ):
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        if unknown:
            options = "url, namespace, num_threads, locality and backpressure"
            raise _wrong("options", f"no others than {options}", ", ".join(unknown))
        if not isinstance(namespace, str):
            raise _wrong("namespace", "a str", shown(namespace))
        is_number = isinstance(num_threads, int) and not isinstance(num_threads, bool)
        if not is_number or not 1 <= num_threads <= MAX_THREADS:
            raise _wrong("num_threads", f"an integer from 1 to {MAX_THREADS}", shown(num_threads))
        if locality not in (None, *(one.value for one in Locality)):
            raise _wrong("locality", '"LOCAL", "REMOTE" or nothing', shown(locality))
        scheme = parse_store_url(url).scheme
        self.locality = None if locality is None else Locality(locality)
        self.medium = Medium.STORAGE if scheme == "tiered" else Medium.CPU
        if scheme in HIT_SOURCES:
            self.cache_hit_source = HIT_SOURCES[scheme]
        # Addresses alone: no view of vLLM's memory outlives it. Jobs end before it does.
        rows = np.asarray(primary_kv_view)
        self._base, self._num_chunks = rows.ctypes.data, len(rows)
        del rows
        self._store = TierStore(
            url, f"{_namespace(offloading_spec, self.block_size_bytes)} {namespace}"
        )
        try:
            self._store.check_page("StoreTier", self.block_size_bytes)
        except InvalidArgument:
            self._store.close()
            raise
        self._lookups = None if self._store.is_local else _Lookups(self._store, tier_type)
        self._failed: dict[str, set[OffloadKey]] = {}  # loads, by request
        self._threads = ThreadPoolExecutor(num_threads, "mk-tier")
        self._running: set[Future[None]] = set()
        self._finished: deque[tuple[TransferJob, JobResult]] = deque()
        log.info("%s: chunks of %d bytes in %s", tier_type, self.block_size_bytes, scheme)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Tell whether the store has a chunk; RETRY while another host is asked."""
        if self._lookups is not None:
            found = self._lookups.lookup(key, req_context)
            if found is None:
                return LookupResult.RETRY
        else:  # one that could not be loaded is not promoted again: it may be there, and wrong
            has_failed = key in self._failed.get(req_context.req_id, ())
            found = not has_failed and bool(self._store.exists_each([key])[0])
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Have a thread store chunks."""
        self._submit(job_metadata, self._store.put_each)

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Have a thread load chunks."""
        if self._lookups is None:
            self._failed.setdefault(job_metadata.req_context.req_id, set())
        self._submit(job_metadata, self._store.get_each)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """Return the jobs that have ended since the last call."""
        results = []
        while self._finished:
            job, result = self._finished.popleft()
            if job.is_promotion and not result.success:
                missing = set(job.keys) - set(result.successful_keys or ())
                if self._lookups is not None:
                    self._lookups.mark_miss(missing)
                # Of a request that has finished meanwhile, nothing would remove it again.
                elif (failed := self._failed.get(job.req_context.req_id)) is not None:
                    failed.update(missing)
            results.append(result)
        return results

    def touch(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Count a use of chunks that vLLM has in another tier, so that the store evicts others."""
        self._start(self._store.use_each, list(keys))

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Take chunks as they are computed."""
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget what was looked up for the request."""
        self._failed.pop(req_context.req_id, None)
        if self._lookups is not None:
            self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Have the lookups of this step begin."""
        if self._lookups is not None:
            self._lookups.flush()

    def drain_jobs(self) -> None:
        """Wait until all jobs have ended; their results are those of the next calls."""
        wait(self._running.copy())

    def shutdown(self) -> None:
        """Wait for all jobs, and close the store, whose objects stay. Idempotent."""
        self._threads.shutdown(wait=True)
        if self._lookups is not None:
            self._lookups.shutdown()
            self._lookups = None
        self._store.close()

    def _submit(self, job: TransferJob, move: Callable[..., np.ndarray]) -> None:
        ids = np.asarray(job.chunk_ids, np.uint64)
        if (ids >= self._num_chunks).any():  # an address of other memory
            log.error("job %d: no chunk of vLLM's memory has id %d", job.job_id, ids.max())
            self._end(job, list(job.keys), np.zeros(len(ids), bool), time.monotonic())
            return
        self._start(self._run, job, move, self._base + ids * np.uint64(self.block_size_bytes))

    def _start(self, call: Callable[..., None], *arguments: Any) -> None:
        future = self._threads.submit(call, *arguments)
        self._running.add(future)
        future.add_done_callback(self._running.discard)

    def _run(
        self, job: TransferJob, move: Callable[..., np.ndarray], addresses: np.ndarray
    ) -> None:
        keys, begin = list(job.keys), time.monotonic()
        try:
            moved = move(keys, addresses, np.full(len(keys), self.block_size_bytes))
        except Exception:
            log.exception("job %d failed", job.job_id)
            moved = np.zeros(len(keys), bool)
        self._end(job, keys, moved, begin)

    def _end(
        self, job: TransferJob, keys: Sequence[OffloadKey], moved: np.ndarray, begin: float
    ) -> None:
        """Report a job: without a result vLLM would keep its chunks for ever."""
        is_done = bool(moved.all())
        kept = [key for key, ok in zip(keys, moved.tolist(), strict=True) if ok]
        result = JobResult(
            job.job_id,
            is_done,
            successful_keys=kept if job.is_promotion and not is_done and kept else None,
            transfer_time=time.monotonic() - begin,
            transfer_bytes=len(kept) * self.block_size_bytes,
        )
        self._finished.append((job, result))


class _Lookups(AsyncLookupManager):  # type: ignore[misc]
    """vLLM's lookups in a thread, of all chunks of a step at once."""

    def __init__(self, store: TierStore, tier_type: str):
        self._store = store
        super().__init__(tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> list[bool]:
        return self._store.exists_each(keys).tolist()


def _namespace(spec: Any, chunk_bytes: int) -> str:
    """Return all that a chunk depends on beyond its key, as far as vLLM tells a tier.

    That is less than a connector knows: neither the model's revision, nor how it is quantized or
    loaded, nor ``hf_overrides``. Engines that differ in these need different ``namespace``s.
    """
    config = spec.config
    parallel = config.parallel
    # Bytes that are the same under any topology are shared by all topologies.
    is_shared = parallel.is_parallelism_agnostic or config.replicated_layout
    sizes = (parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size)
    parts = {
        "version": vllm.__version__,
        "platform": current_platform.device_type,
        "model": config.model.name,
        "dtype": config.model.dtype,
        "parallel": "any" if is_shared else sizes,
        "layout": [config.kv_cache_layout, config.canonical_layout, config.replicated_layout],
        "groups": [[group.tokens_per_block, group.layer_names] for group in config.groups],
        "chunk": [config.cache.tokens_per_hash, config.cache.blocks_per_chunk, chunk_bytes],
    }
    return namespace_of("vllm", parts)


def _wrong(argument: str, need: str, value: str) -> InvalidArgument:
    return InvalidArgument(f"StoreTier: {argument} must be {need}, got {value}")
