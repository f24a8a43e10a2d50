"""What routers are told of the store, as vLLM's own events."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_events import BlockRemoved, BlockStored, KVCacheEvent
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

from .block_events import RemovedBlocks, StoredBlocks

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheGroupSpec


class KVEvents:
    """Writes events as vLLM writes those of its own cache, but for the medium.

    Args:
        groups: of the engine's cache.
        medium: where the store is: vLLM's "CPU" or "STORAGE".
    """

    def __init__(self, groups: "Sequence[KVCacheGroupSpec]", medium: str):
        self._specs = [group.kv_cache_spec for group in groups]
        self._medium = medium

    def of(self, changes: Iterable[StoredBlocks | RemovedBlocks]) -> list[KVCacheEvent]:
        """Return an event for each change, in their order."""
        return [
            self._stored(one) if isinstance(one, StoredBlocks) else self._removed(one)
            for one in changes
        ]

    def _stored(self, blocks: StoredBlocks) -> BlockStored:
        request, spec = blocks.request, self._specs[blocks.group]
        size, adapter = spec.block_size, request.lora_request
        places = range(blocks.place, blocks.place + len(blocks.hashes))
        extra = [
            generate_block_hash_extra_keys(request, place * size, (place + 1) * size, 0)[0]
            for place in places
        ]
        parent = blocks.parent
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(name) for name in blocks.hashes],
            parent_block_hash=None if parent is None else maybe_convert_block_hash(parent),
            token_ids=blocks.tokens,
            block_size=size,
            lora_id=adapter.adapter_id if adapter else None,
            medium=self._medium,
            lora_name=adapter.name if adapter else None,
            extra_keys=to_event_extra_keys(extra),
            group_idx=blocks.group,
            kv_cache_spec_kind=get_kv_cache_spec_kind(spec).value,
            kv_cache_spec_sliding_window=get_kv_cache_spec_sliding_window(spec),
            session_id=request.session_id,
        )

    def _removed(self, blocks: RemovedBlocks) -> BlockRemoved:
        names = [maybe_convert_block_hash(name) for name in blocks.hashes]
        return BlockRemoved(block_hashes=names, medium=self._medium, group_idx=blocks.group)
