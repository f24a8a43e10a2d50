"""``StoreConnector``: the calls that vLLM makes, in its scheduler and in its workers."""

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)

from mooncake_kernels.errors import Unavailable
from mooncake_serving.store import Store

from .caches import Caches, use
from .namespace import fresh, namespace_of, refuse_unnamed
from .settings import open_store, parse
from .tracking import Blocks, Tracker, keys_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger("mooncake_serving.connectors.vllm")

# The step in which a block did not come, and one that the scheduler may have begun before it knew.
NUM_WRONG_STEPS = 2


@dataclass
class StoreMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not there
    """The scheduler's instructions to the workers for a step.

    Attributes:
        namespace: of all keys.
        loads: before it computes.
        saves: after it.
    """

    namespace: str
    loads: list[Blocks] = field(default_factory=list)
    saves: list[Blocks] = field(default_factory=list)


class StoreConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """Extends vLLM's prefix cache by a store that all engines of a host share.

    The scheduler looks up which blocks of a prompt the store has beyond those of the engine's own
    cache, without a lock and in microseconds; the worker loads them before the step that needs
    them, and saves each block after the step that fills it. A block is an object of the store under
    the engine's own hash of all tokens up to its end. A block evicted between the look-up and the
    load is reported, and vLLM fails the request or recomputes it, according to its
    ``kv_load_failure_policy``; what was computed in the same step is not saved.

    Args:
        vllm_config: as passed to every connector; its ``kv_connector_extra_config`` is described at
            ``Settings``. ``kv_producer`` does not load, ``kv_consumer`` does not save.
        role: of this connector, scheduler or worker.
        kv_cache_config: one group of layers that attend to all tokens before them.

    Raises:
        InvalidArgument: the configuration is wrong.
        Unavailable: the blocks of the model's caches are not all alike, the engine has several
            workers, blocks depend on something that does not distinguish their keys, or vLLM would
            not recompute correctly.
    """

    def __init__(
        self,
        vllm_config: "VllmConfig",
        role: KVConnectorRole,
        kv_cache_config: "KVCacheConfig",
    ):
        super().__init__(vllm_config, role, kv_cache_config)
        form = _form_of_caches(vllm_config, kv_cache_config)
        transfers = vllm_config.kv_transfer_config
        self._block_size: int = form.block_size
        self._settings = parse(transfers.kv_connector_extra_config)
        refuse_unnamed(vllm_config, self._settings)
        self._loads = transfers.is_kv_consumer
        if self._loads:
            _check_recomputing(vllm_config)
        kind = current_platform.device_type
        self._namespace = namespace_of(vllm_config, vllm.__version__, kind, form)
        self._store: Store | None = None  # a worker opens it when it knows the namespace
        self._opened_namespace = ""
        if role == KVConnectorRole.SCHEDULER:
            self._opened(self._namespace)
        self._tracker = Tracker(saves=transfers.is_kv_producer)
        self._num_computed: dict[str, int] = {}  # blocks, of requests being looked up
        self._caches: Caches | None = None
        self._failed: set[int] = set()
        self._num_wrong_steps = 0  # whose results are not saved

    @property
    def requires_kv_delivery(self) -> bool:
        """Whether delivery is required: no, what is not saved is recomputed."""
        return False

    # --- of the scheduler ---------------------------------------------------------------------

    def get_num_new_matched_tokens(
        self, request: "Request", num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Count the tokens that the store has after those that the engine has."""
        first = num_computed_tokens // self._block_size
        self._num_computed[request.request_id] = first
        if not self._loads or num_computed_tokens % self._block_size:
            return 0, False
        # The last token is always computed: its output is needed.
        end = (request.num_tokens - 1) // self._block_size
        keys = keys_of(request.block_hashes[first:end])
        return self._opened(self._namespace).match_prefix(keys) * self._block_size, False

    def update_state_after_alloc(
        self, request: "Request", blocks: "KVCacheBlocks", num_external_tokens: int
    ) -> None:
        """Track the request, and load what was found for it."""
        self._tracker.add(request.request_id, request.block_hashes)
        first = self._num_computed.pop(request.request_id, 0)
        count = num_external_tokens // self._block_size
        if count > 0:
            (ids,) = blocks.get_block_ids()
            self._tracker.load(request.request_id, first, ids[first : first + count])
            keys = keys_of(request.block_hashes[first : first + count])
            use(self._opened(self._namespace), keys)

    def build_connector_meta(self, scheduler_output: "SchedulerOutput") -> StoreMetadata:
        """Return what this step loads and saves."""
        scheduled = scheduler_output.num_scheduled_tokens
        for new in scheduler_output.scheduled_new_reqs:
            self._step(new.req_id, new.block_ids, new.num_computed_tokens, scheduled, is_new=True)
        cached = scheduler_output.scheduled_cached_reqs
        for i, name in enumerate(cached.req_ids):
            ids, done = cached.new_block_ids[i], cached.num_computed_tokens[i]
            self._step(name, ids, done, scheduled, is_new=name in cached.resumed_req_ids)
        return StoreMetadata(self._namespace, *self._tracker.take())

    def _step(
        self,
        name: str,
        ids: tuple[list[int], ...] | None,
        num_computed: int,
        scheduled: dict[str, int],
        *,
        is_new: bool,
    ) -> None:
        if not self._tracker.knows(name):
            return
        if is_new:
            self._tracker.forget_blocks(name)
            self._tracker.skip(name, num_computed // self._block_size)
        if ids is not None:
            self._tracker.extend(name, ids[0])
        self._tracker.compute(name, (num_computed + scheduled[name]) // self._block_size)

    def update_connector_output(self, connector_output: "KVConnectorOutput") -> None:
        """After a failed load, trust nothing that may have been computed in the same step.

        In vLLM, requests share blocks from their allocation on, under the hashes of their future
        content. So nothing more is saved of the current requests, and new requests do not find
        their blocks in vLLM's own cache: the correct ones are in the store.
        """
        if connector_output.invalid_block_ids:
            self._tracker.forget_all()
            assert self._kv_cache_manager is not None, "vLLM binds it before the first step"
            self._kv_cache_manager.evict_blocks(set(range(self._kv_cache_config.num_blocks)))

    def request_finished(
        self, request: "Request", block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request: its blocks were saved when they became full."""
        self._num_computed.pop(request.request_id, None)
        self._tracker.remove(request.request_id)
        return False, None

    def reset_cache(self) -> bool | None:
        """Neither load nor save any more what any engine has in the store now.

        The weights may have changed, and those of other engines not: this one has a namespace of
        its own from now on. The workers learn of it with the next step; one that is under way still
        saves to the former one. What is left there, the store evicts.
        """
        self._namespace = fresh(self._namespace)
        self._tracker.forget_all()
        return True

    # --- of a worker --------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Set the caches of all layers."""
        self._caches = Caches(list(kv_caches.values()), self._kv_cache_config.num_blocks)
        log.info("%d layers, %d bytes a block", len(kv_caches), self._caches.block_bytes)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load, and wait for the end."""
        told = self._told()
        for blocks in told.loads:
            assert self._caches is not None, "vLLM registers its caches before the first step"
            try:
                missing = self._caches.load(self._opened(told.namespace), blocks)
            except (OSError, Unavailable) as error:
                log.warning("%d blocks could not be loaded: %s", len(blocks.ids), error)
                missing = set(blocks.ids)
            self._failed |= missing
            if missing:
                self._num_wrong_steps = NUM_WRONG_STEPS

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: all layers are there when ``start_load_kv`` returns."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Do nothing: whole blocks are saved when the last layer has been computed."""

    def wait_for_save(self) -> None:
        """Save the blocks that this step has filled, unless it used blocks that did not come.

        Requests of one step may share blocks, so nothing of it is saved then.
        """
        if self._num_wrong_steps > 0:
            self._num_wrong_steps -= 1
            return
        told = self._told()
        for blocks in told.saves:
            assert self._caches is not None, "vLLM registers its caches before the first step"
            try:
                self._caches.save(self._opened(told.namespace), blocks)
            except (OSError, Unavailable) as error:
                log.warning("%d blocks could not be saved: %s", len(blocks.ids), error)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that did not come, once."""
        failed, self._failed = self._failed, set()
        return failed

    def shutdown(self) -> None:
        """Close the pool; its objects stay for other engines."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _opened(self, namespace: str) -> Store:
        if self._store is None or namespace != self._opened_namespace:
            self.shutdown()
            self._store = open_store(self._settings, namespace)
            self._opened_namespace = namespace
        return self._store

    def _told(self) -> StoreMetadata:
        told = self._get_connector_metadata()
        assert isinstance(told, StoreMetadata), "vLLM passes on what build_connector_meta returned"
        return told


def _check_recomputing(config: "VllmConfig") -> None:
    """Refuse what makes vLLM 0.32 compute wrong results, or crash, after blocks that did not come.

    https://github.com/vllm-project/vllm/issues/49250: tokens that are scheduled ahead remain
    counted for the request, and the V2 model runner continues where it was. With a threshold,
    requests that share its blocks compute before these are correct again.
    """
    if config.kv_transfer_config.kv_load_failure_policy != "recompute":
        return
    for is_wrong, what in (
        (config.scheduler_config.async_scheduling, "async scheduling"),
        (config.use_v2_model_runner, "the V2 model runner"),
        (config.scheduler_config.long_prefill_token_threshold > 0, "long_prefill_token_threshold"),
    ):
        if is_wrong:
            raise Unavailable(
                f'StoreConnector: kv_load_failure_policy must be "fail" with {what}, '
                'got "recompute"'
            )


def _form_of_caches(config: "VllmConfig", caches: "KVCacheConfig") -> "AttentionSpec":
    """Return the form of a layer's cache; refuse blocks that a hash alone does not name."""
    specs = [group.kv_cache_spec for group in caches.kv_cache_groups]
    if len(specs) == 1 and isinstance(specs[0], UniformTypeKVCacheSpecs):
        specs = [*specs[0].kv_cache_specs.values()]
    elif len(specs) != 1:
        raise Unavailable(
            f"StoreConnector: the model must have one group of KV caches, got {len(specs)}"
        )
    for spec in specs:
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
            raise Unavailable(
                "StoreConnector: layers must have FullAttentionSpec or MLAAttentionSpec, got "
                f"{type(spec).__name__}"
            )
        if spec.non_causal:  # blocks depend on what comes after them
            raise Unavailable("StoreConnector: layers must be causal, got one that is not")
    # Several would have to learn of each other's failed loads before any of them saves.
    if (size := config.parallel_config.world_size) != 1:
        raise Unavailable(f"StoreConnector: the engine must have one worker, got {size}")
    return specs[0]
