"""What routers are told of an engine's own cache, as vLLM's events."""

from mooncake_serving.engine.caching_allocator import DroppedBlocks, KeptBlocks
from mooncake_serving.store.events import AnyEvent, BlockHash, BlockRemoved, BlockStored

MEDIUM = "GPU"  # vLLM's word for an engine's own cache, wherever it is


def event_of(change: KeptBlocks | DroppedBlocks, block_size: int) -> AnyEvent:
    """Return the event of a change.

    Args:
        change: of the engine's allocator.
        block_size: tokens of a block.
    """
    names: list[BlockHash] = list(change.names)
    if isinstance(change, DroppedBlocks):
        return BlockRemoved(names, MEDIUM)
    return BlockStored(names, change.parent, list(change.token_ids), block_size, None, MEDIUM)
