"""``StoreConnector``: the calls that vLLM makes, in its scheduler and in its workers."""

import logging
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from mooncake_kernels.errors import Unavailable

from .handoff_scheduler import HandoffScheduler
from .handoff_step import HandoffStep, parse_handoff
from .handoff_worker import HandoffWorker
from .hit_sources import HIT_SOURCES
from .kv_events import KVEvents
from .namespace import identity_of, namespace_of, refuse_unnamed
from .scheduler import StoreScheduler
from .settings import Settings, acquire_store, parse, release_store, without_pool
from .stats import StoreMetrics, StoreStats
from .steps import GroupForm, Report, Shards, Step
from .worker import StoreWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class ConnectorMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there
    """A step's instructions to the workers.

    Attributes:
        store: of the ``StoreScheduler``, if there is a store.
        handoff: of the ``HandoffScheduler``, if there are hand-offs.
    """

    store: Step | None
    handoff: HandoffStep | None


@dataclass
class ConnectorWorkerMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What a worker reports to the scheduler: a ``StoreWorker``'s part."""

    store: Report

    def aggregate(self, other: "ConnectorWorkerMetadata") -> "ConnectorWorkerMetadata":
        return ConnectorWorkerMetadata(self.store.merged(other.store))


@dataclass
class WorkerAddress(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a worker is reached for hand-offs."""

    name: str


class StoreConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Extends vLLM's prefix cache by a store that engines share, and hands requests over from an
    engine that prefills to one that decodes; either, or both.

    A ``StoreScheduler`` looks up what the store has of a prompt beyond the engine's own cache;
    each worker's ``StoreWorker`` loads it before the request joins the batch, and saves blocks
    after the step that fills them. This class passes vLLM's calls on to them.

    For hand-offs, a ``HandoffScheduler`` and each worker's ``HandoffWorker`` get the same calls
    first: of a request that another engine prefills, the store loads nothing.

    Args:
        vllm_config: as passed to every connector; its ``kv_connector_extra_config`` is described at
            ``Settings``. ``kv_producer`` does not load, ``kv_consumer`` does not save.
        role: of this connector, scheduler or worker.
        kv_cache_config: the groups of the engine's cache.

    Raises:
        InvalidArgument: the configuration is wrong.
        Unavailable: there is a group whose blocks a store cannot hold, blocks depend on something
            that does not distinguish their keys, or the store cannot be opened.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        settings = parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self.scheduler: StoreScheduler | None = None
        self.worker: StoreWorker | None = None
        self.handoff_scheduler: HandoffScheduler | None = None
        self.handoff_worker: HandoffWorker | None = None
        self._handed_off: set[str] = set()  # requests that another engine prefills
        if settings.handoff is not None:
            _check_handoff(vllm_config, kv_cache_config)
            if role == KVConnectorRole.SCHEDULER:
                self.handoff_scheduler = _handoff_scheduler(vllm_config, kv_cache_config)
            else:
                self.handoff_worker = _handoff_worker(
                    vllm_config, kv_cache_config, settings.handoff
                )
        if not settings.url:
            return
        refuse_unnamed(vllm_config, settings)
        _check_processes(vllm_config, settings)
        self._cache_hit_source = HIT_SOURCES.get(settings.store_url.scheme)
        groups = _groups_of(kv_cache_config)
        if role == KVConnectorRole.SCHEDULER:
            self._make_scheduler(settings, groups)
        else:
            self._make_worker(settings, groups)

    def _make_scheduler(self, settings: Settings, groups: list[GroupForm]) -> None:
        config, caches = self._vllm_config, self._kv_cache_config
        parallel, transfers = config.parallel_config, config.kv_transfer_config
        num_shards = _shards_of(config, caches).count
        form = {
            "groups": [[str(g.kv_cache_spec), g.layer_names] for g in caches.kv_cache_groups],
            "shards": [num_shards, parallel.pipeline_parallel_size],
            "partition": os.environ.get("VLLM_PP_LAYER_PARTITION"),
        }
        namespace = namespace_of(config, vllm.__version__, _platform(), form)
        url = settings.url
        if settings.store_url.scheme == "redis" and not _is_one_process(config):
            url = without_pool(url)
        self._store = acquire_store(url, f"{settings.namespace}/{namespace}", settings.verify)
        self.scheduler = StoreScheduler(
            self._store,
            namespace,
            groups,
            tokens_per_hash=resolve_kv_cache_block_sizes(caches, config)[1],
            num_blocks=caches.num_blocks,
            num_shards=num_shards,
            num_workers=parallel.world_size,
            loads=transfers.is_kv_consumer,
            saves=transfers.is_kv_producer,
            events=bool(config.kv_events_config and config.kv_events_config.enable_kv_cache_events),
        )
        medium = MEDIUM_STORAGE if settings.store_url.scheme == "tiered" else MEDIUM_CPU
        self._kv_events = KVEvents(caches.kv_cache_groups, medium)

    def _make_worker(self, settings: Settings, groups: list[GroupForm]) -> None:
        caches = self._kv_cache_config
        self.worker = StoreWorker(
            lambda name: acquire_store(
                settings.url, f"{settings.namespace}/{name}", settings.verify
            ),
            release_store,
            groups,
            [group.layer_names for group in caches.kv_cache_groups],
            num_blocks=caches.num_blocks,
            shards=_shards_of(self._vllm_config, caches),
            num_threads=settings.num_threads,
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether delivery is required: what is not saved is recomputed, what is not handed off is
        lost.
        """
        return self.handoff_scheduler is not None and super().requires_kv_delivery

    # --- of the scheduler ---------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, WorkerAddress]) -> None:
        """Learn where the workers are reached."""
        if self.handoff_scheduler is not None:
            self.handoff_scheduler.set_ranks([metadata[rank].name for rank in sorted(metadata)])

    def bind_gpu_block_pool(self, gpu_block_pool: "BlockPool") -> None:
        """Give the scheduler's side the references that keep blocks."""
        if self.scheduler is not None:
            self.scheduler.bind_block_pool(gpu_block_pool)

    def on_new_request(self, request: "Request") -> None:
        """Let other engines ask for a request before it is computed."""
        if self.handoff_scheduler is not None:
            self.handoff_scheduler.added(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the tokens that can be loaded after those that the engine has."""
        self._handed_off.discard(request.request_id)
        if self.handoff_scheduler is not None:
            count = self.handoff_scheduler.matched(request, num_computed_tokens)
            if count > 0:
                self._handed_off.add(request.request_id)
                return count, True
        if self.scheduler is None:
            return 0, False
        return self.scheduler.matched(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """Return the groups that a load fills: a hand-off has the request's own blocks."""
        if request.request_id in self._handed_off:
            return self._kv_cache_config.transfer_group_ids
        return super().get_loaded_kv_cache_group_ids(request)

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Track the request, and load what was found for it."""
        ids = blocks.get_block_ids()
        is_handed_off = request.request_id in self._handed_off
        if self.handoff_scheduler is not None:
            count = num_external_tokens if is_handed_off else 0
            self.handoff_scheduler.allocated(request, ids, count)
        if self.scheduler is not None:
            is_awaited = is_handed_off and num_external_tokens > 0
            count = 0 if is_handed_off else num_external_tokens
            self.scheduler.allocated(request, ids, count, is_awaited=is_awaited)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> ConnectorMetadata:
        """Return what this step loads, saves and hands over."""
        handoff = store = None
        if self.handoff_scheduler is not None:
            handoff = self.handoff_scheduler.step(scheduler_output)
        if self.scheduler is not None:
            store = self.scheduler.step(scheduler_output)
        return ConnectorMetadata(store, handoff)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Take the workers' reports."""
        if self.scheduler is not None:
            told = connector_output.kv_connector_worker_meta
            self.scheduler.output(
                told.store if isinstance(told, ConnectorWorkerMetadata) else None,
                connector_output.finished_recving or (),
                connector_output.failed_recving or (),
            )
        if self.handoff_scheduler is not None:
            self.handoff_scheduler.output(connector_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Likewise, for an engine with one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request. References keep the blocks still to be saved; those to be sent stay
        until the workers say that they were.
        """
        self._handed_off.discard(request.request_id)
        is_loading = False
        if self.scheduler is not None:
            self.scheduler.finished(request, block_ids)
            is_loading = self.scheduler.is_loading(request.request_id)
        if self.handoff_scheduler is not None:
            return self.handoff_scheduler.finished(request, is_loading=is_loading)
        return False, None

    def take_events(self) -> list[KVCacheEvent]:
        """Return which blocks have come to the store, with their tokens, and gone from it."""
        return [] if self.scheduler is None else self._kv_events.of(self.scheduler.take_events())

    def has_pending_push_work(self) -> bool:
        """Keep an engine without requests going until its blocks are copied out and told of, and
        its workers know what there is to know of hand-offs.
        """
        sides = (self.scheduler, self.handoff_scheduler)
        return any(side is not None and side.has_waiting for side in sides)

    def reset_cache(self) -> bool | None:
        """Neither load nor save any more what any engine has in the store now.

        The weights may have changed, and those of other engines not: this one's blocks have names
        of their own from now on. A step that is under way still saves under the former ones. What
        is left there, the store evicts.
        """
        return self.scheduler.reset() if self.scheduler is not None else True

    # --- of a worker --------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, "torch.Tensor"]) -> None:
        """Set the caches of all layers, and listen for other engines."""
        for side in self._workers():
            side.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> WorkerAddress | None:
        """Return where this worker is reached for hand-offs."""
        return None if self.handoff_worker is None else WorkerAddress(self.handoff_worker.address)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Stop the hand-off from reading blocks that this step overwrites. Those of a save are
        kept from that.
        """
        if self.handoff_worker is not None:
            assert isinstance(kv_connector_metadata, ConnectorMetadata)
            assert kv_connector_metadata.handoff is not None
            self.handoff_worker.preempted(kv_connector_metadata.handoff)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin what this step loads."""
        told = self._told()
        if self.handoff_worker is not None and told.handoff is not None:
            self.handoff_worker.start(told.handoff)
        if self.worker is not None and told.store is not None:
            self.worker.start(told.store)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request joins the batch when all its layers are there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: "torch.Tensor", attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole blocks are saved when the last layer has been computed."""

    def wait_for_save(self) -> None:
        """Begin to save and to send the blocks that this step fills. Waits for nothing."""
        told = self._told()
        if self.handoff_worker is not None and told.handoff is not None:
            self.handoff_worker.save(told.handoff)
        if self.worker is not None and told.store is not None:
            self.worker.save(told.store)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Return the requests whose blocks were sent, and those whose blocks came."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Likewise, with those whose load failed: of such a request, nothing was computed."""
        received, failed = (set(), set()) if self.worker is None else self.worker.get_finished()
        if self.handoff_worker is None:
            return KVConnectorTransferResults(set(), received, failed)
        more = self.handoff_worker.results(finished_req_ids)
        return KVConnectorTransferResults(more.sent, received | more.received, failed | more.failed)

    def build_connector_worker_meta(self) -> ConnectorWorkerMetadata | None:
        """Return what the scheduler's side has to learn."""
        report = None if self.worker is None else self.worker.report()
        return None if report is None else ConnectorWorkerMetadata(report)

    def get_kv_connector_stats(self) -> StoreStats | None:
        """Return what this connector has counted since the last call."""
        side = self.scheduler or self.worker
        counts = None if side is None else side.counts()
        return StoreStats(data=counts) if counts else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> StoreStats | None:
        """Return counts that another process has sent."""
        return StoreStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: "VllmConfig",
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> StoreMetrics:
        """Return the metrics of vLLM's /metrics."""
        return StoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """End the threads and close the store; its objects stay for other engines."""
        for side in self._workers():
            side.close()
        if self.scheduler is not None:
            self.scheduler.close()
            release_store(self._store)

    def _workers(self) -> list[Any]:
        return [side for side in (self.worker, self.handoff_worker) if side is not None]

    def _told(self) -> ConnectorMetadata:
        told = self._get_connector_metadata()
        assert isinstance(told, ConnectorMetadata), "vLLM passes on what build_connector_meta made"
        return told


def _groups_of(caches: "KVCacheConfig") -> list[GroupForm]:
    """Return the groups' forms; refuse blocks that a hash alone does not name."""
    groups = caches.kv_cache_groups
    if caches.prefix_cacheable_group_ids != tuple(range(len(groups))):
        raise Unavailable(
            "StoreConnector: all groups of layers must be those of a prefix cache, got "
            f"{[type(group.kv_cache_spec).__name__ for group in groups]}"
        )
    return [_form_of(group.kv_cache_spec) for group in groups]


def _transferred(caches: "KVCacheConfig") -> list[GroupForm]:
    """Return the forms of the groups that are handed over."""
    return [_form_of(group.kv_cache_spec) for group in caches.transfer_groups]


def _form_of(spec: "KVCacheSpec") -> GroupForm:
    is_mixed = isinstance(spec, UniformTypeKVCacheSpecs)
    for one in spec.kv_cache_specs.values() if is_mixed else [spec]:
        if type(one) is MambaSpec:
            _check_states(one)
            continue
        if type(one) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
            raise Unavailable(
                "StoreConnector: layers must have FullAttentionSpec, MLAAttentionSpec, "
                f"SlidingWindowSpec or MambaSpec, got {type(one).__name__}"
            )
        if getattr(one, "non_causal", False):  # blocks depend on what comes after them
            raise Unavailable("StoreConnector: layers must be causal, got one that is not")
    if type(one) is MambaSpec:
        return GroupForm("state", spec.block_size)
    window = getattr(one, "sliding_window", None) if type(one) is SlidingWindowSpec else None
    return GroupForm("full" if window is None else "window", spec.block_size, window)


def _check_states(spec: "MambaSpec") -> None:
    """Refuse states of which vLLM does not say where one of a whole block is."""
    if spec.mamba_cache_mode != "align":
        raise Unavailable(
            'StoreConnector: mamba_cache_mode must be "align", got '
            f'"{spec.mamba_cache_mode}" (vLLM sets it with enable_prefix_caching)'
        )
    if spec.num_speculative_blocks:
        raise Unavailable(
            "StoreConnector: a model with recurrent layers must have no speculative decoding, got "
            f"{spec.num_speculative_blocks} blocks for it"
        )


def _shards_of(config: "VllmConfig", caches: "KVCacheConfig") -> Shards:
    """Return which part of a block is this worker's."""
    parallel = config.parallel_config
    tensor, pipeline = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    # As of latents. Stages may differ in it, and each would have to know that of all.
    replicas = max(caches.kv_tp_replicas, 1) if pipeline == 1 else 1
    per_stage = max(tensor // replicas, 1)
    stage, rank = parallel.rank // tensor % pipeline, parallel.rank % tensor
    number = stage * per_stage + rank // replicas
    return Shards(per_stage * pipeline, number, rank % replicas == 0)


def _platform() -> str:
    """Name the kind of device; attention on a CPU orders a block's bytes by what it can do."""
    kind: str = current_platform.device_type
    if kind != "cpu":
        return kind
    amx = "amx" if torch.cpu._is_amx_tile_supported() else "no amx"
    return f"cpu {platform.machine()} {torch.backends.cpu.get_cpu_capability()} {amx}"


def _is_one_process(config: "VllmConfig") -> bool:
    return config.parallel_config.distributed_executor_backend == "uni"


def _check_processes(config: "VllmConfig", settings: Settings) -> None:
    """Refuse what engines of several workers cannot do."""
    parallel = config.parallel_config
    if parallel.distributed_executor_backend == "external_launcher" and parallel.world_size > 1:
        raise Unavailable(
            "StoreConnector: distributed_executor_backend must not be external_launcher for an "
            "engine of several workers, whose reports vLLM does not gather then"
        )
    for name in (
        "pipeline_parallel_size",  # vLLM 0.32 on the CPU fails with it, and nothing else was tried
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        if (size := getattr(parallel, name, 1)) != 1:
            raise Unavailable(f"StoreConnector: {name} must be 1, got {size}")
    if settings.store_url.scheme == "tiered" and not _is_one_process(config):
        raise Unavailable(
            "StoreConnector: url must be shm: or redis: for an engine whose workers are processes "
            "of their own, since one process has a disk, got tiered:"
        )


def _handoff_scheduler(config: "VllmConfig", caches: "KVCacheConfig") -> HandoffScheduler:
    transfers = config.kv_transfer_config
    return HandoffScheduler(
        transfers.engine_id,
        dict(zip(caches.transfer_group_ids, _transferred(caches), strict=True)),
        sends=transfers.is_kv_producer,
        receives=transfers.is_kv_consumer,
    )


def _handoff_worker(
    config: "VllmConfig", caches: "KVCacheConfig", given: Mapping[str, Any]
) -> HandoffWorker:
    _log_as_vllm()
    transfers, parallel = config.kv_transfer_config, config.parallel_config
    options = parse_handoff(given)
    name = identity_of(config, options.settings.model, _platform())
    return HandoffWorker(
        replace(
            options,
            host=options.host or get_ip(),
            port=options.port and options.port + parallel.data_parallel_index,
            settings=replace(options.settings, model=name),
        ),
        transfers.engine_id,
        _transferred(caches),
        [group.layer_names for group in caches.transfer_groups],
        num_blocks=caches.num_blocks,
        rank=get_tensor_model_parallel_rank(),
        num_ranks=parallel.tensor_parallel_size,
        num_heads=config.model_config.get_total_num_kv_heads(),
        sends=transfers.is_kv_producer,
        receives=transfers.is_kv_consumer,
    )


def _log_as_vllm() -> None:
    """Show our messages among vLLM's, which prints no others below a warning."""
    ours, theirs = logging.getLogger("mooncake_serving"), logging.getLogger("vllm")
    if ours.level == logging.NOTSET and not ours.hasHandlers():
        ours.setLevel(theirs.getEffectiveLevel())
        for handler in theirs.handlers:
            ours.addHandler(handler)


def _check_handoff(config: "VllmConfig", caches: "KVCacheConfig") -> None:
    """Refuse engines whose blocks cannot be handed over."""
    parallel = config.parallel_config
    if parallel.world_size != parallel.tensor_parallel_size:
        raise Unavailable(
            "StoreConnector: the engine must be tensor parallel alone for a hand-off, got "
            f"{parallel.world_size} workers for {parallel.tensor_parallel_size} ranks"
        )
    if (size := parallel.decode_context_parallel_size) != 1:
        raise Unavailable(
            f"StoreConnector: decode_context_parallel_size must be 1 for a hand-off, got {size}"
        )
    # It then zeroes blocks before it says which requests have lost theirs.
    if caches.needs_kv_cache_zeroing and config.use_v2_model_runner:
        raise Unavailable(
            "StoreConnector: caches must need no zeroing for a hand-off with the V2 model runner, "
            "as those of recurrent layers and of several dtypes (kv_cache_dtype_skip_layers) do: "
            "set VLLM_USE_V2_MODEL_RUNNER=0"
        )
