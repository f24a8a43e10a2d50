"""``HandoffConnector``: vLLM's calls, for an engine that hands requests over and does no more."""

import logging
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip

from mooncake_kernels.errors import Unavailable

from .handoff_scheduler import HandoffScheduler
from .handoff_step import HandoffStep, parse_handoff
from .handoff_worker import HandoffWorker

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


@dataclass
class HandoffMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there
    """A step's instructions to the workers."""

    step: HandoffStep = field(default_factory=HandoffStep)


@dataclass
class HandoffAddress(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """Where a rank is reached."""

    name: str


def make_scheduler(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> HandoffScheduler:
    """Return the scheduler's part for an engine.

    Raises:
        Unavailable: the engine is pipeline or context parallel.
    """
    _check_parallel(vllm_config)
    transfers = vllm_config.kv_transfer_config
    return HandoffScheduler(
        transfers.engine_id,
        kv_cache_config.transfer_group_ids,
        sends=transfers.is_kv_producer,
        receives=transfers.is_kv_consumer,
    )


def make_worker(vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig") -> HandoffWorker:
    """Return the part of the worker of this process.

    Raises:
        InvalidArgument: a setting is wrong.
        Unavailable: the engine is pipeline or context parallel.
    """
    _check_parallel(vllm_config)
    _log_as_vllm()
    transfers, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
    # In a block, attention on a CPU orders bytes by what the processor can do.
    kind = current_platform.device_type
    if kind == "cpu":
        kind = f"cpu {torch.backends.cpu.get_cpu_capability()}"
    model = vllm_config.model_config
    config = transfers.kv_connector_extra_config.get("handoff", {})
    options = parse_handoff(config, f"{model.model} on {kind}"[-512:])
    return HandoffWorker(
        replace(
            options,
            host=options.host or get_ip(),
            port=options.port and options.port + parallel.data_parallel_index,
        ),
        transfers.engine_id,
        kv_cache_config,
        rank=get_tensor_model_parallel_rank(),
        num_ranks=parallel.tensor_parallel_size,
        num_heads=model.get_total_num_kv_heads(),
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


def _check_parallel(config: "VllmConfig") -> None:
    parallel = config.parallel_config
    if parallel.world_size != parallel.tensor_parallel_size:
        raise Unavailable(
            "hand-off: the engine must be tensor parallel alone, got "
            f"{parallel.world_size} workers for {parallel.tensor_parallel_size} ranks"
        )
    if parallel.decode_context_parallel_size > 1:
        raise Unavailable(
            "hand-off: decode_context_parallel_size must be 1, "
            f"got {parallel.decode_context_parallel_size}"
        )


class HandoffConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Prefill in one engine, decode in another: docs/serving/handoff.md.

    Args:
        vllm_config: as passed to every connector; ``kv_producer`` prefills for others,
            ``kv_consumer`` has others prefill, ``kv_both`` either. ``"handoff"`` of its
            ``kv_connector_extra_config`` is described at ``HandoffOptions``.
        role: of this connector, scheduler or worker.
        kv_cache_config: groups of layers that attend to all tokens before them.

    Raises:
        InvalidArgument: a setting is wrong.
        Unavailable: the engine is pipeline or context parallel.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        self._scheduler = self._worker = None
        if role == KVConnectorRole.SCHEDULER:
            self._scheduler = make_scheduler(vllm_config, kv_cache_config)
        else:
            self._worker = make_worker(vllm_config, kv_cache_config)

    # --- of the scheduler ---------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, HandoffAddress]) -> None:
        """Learn where the workers are reached."""
        self._of_scheduler.set_ranks([metadata[rank].name for rank in sorted(metadata)])

    def on_new_request(self, request: "Request") -> None:
        """Let other engines ask for a request before it is computed."""
        self._of_scheduler.added(request)

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the tokens that another engine sends, beside the computation of others."""
        count = self._of_scheduler.matched(request, num_computed_tokens)
        return count, count > 0

    def get_loaded_kv_cache_group_ids(self, request: "Request") -> tuple[int, ...]:
        """Return all groups: a request's own blocks are transferred."""
        return self._kv_cache_config.transfer_group_ids

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Begin a hand-off."""
        self._of_scheduler.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> HandoffMetadata:
        """Return what this step begins, ends and computes."""
        return HandoffMetadata(self._of_scheduler.step(scheduler_output))

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """Forget what is over."""
        self._of_scheduler.output(connector_output)

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request; its blocks stay until they are sent."""
        return self._of_scheduler.finished(request)

    def request_finished_all_groups(
        self, request: "Request", block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """End a request; its blocks stay until they are sent."""
        return self._of_scheduler.finished(request)

    # --- of a worker --------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Set the caches of all layers, and listen."""
        self._of_worker.register_kv_caches(kv_caches)

    def get_handshake_metadata(self) -> HandoffAddress:
        """Return where this worker is reached."""
        return HandoffAddress(self._of_worker.address)

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Stop to read blocks that this step overwrites."""
        assert isinstance(kv_connector_metadata, HandoffMetadata), "it is the scheduler's"
        self._of_worker.preempted(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin to receive."""
        self._of_worker.start(self._step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled when all of it is there."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole blocks are sent when the last layer has been computed."""

    def wait_for_save(self) -> None:
        """Have what was computed sent."""
        self._of_worker.save(self._step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return what has ended."""
        results = self._of_worker.results(finished_req_ids)
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def shutdown(self) -> None:
        """End all."""
        if self._worker is not None:
            self._worker.close()

    @property
    def _of_scheduler(self) -> HandoffScheduler:
        assert self._scheduler is not None, "vLLM calls this in its scheduler"
        return self._scheduler

    @property
    def _of_worker(self) -> HandoffWorker:
        assert self._worker is not None, "vLLM calls this in its workers"
        return self._worker

    @property
    def _step(self) -> HandoffStep:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, HandoffMetadata), "it is what build_connector_meta returned"
        return metadata.step
