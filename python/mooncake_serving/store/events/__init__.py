"""KV events, for routers that track which pool has what: published over ZeroMQ in vLLM's format.

::

    pool = ObservedPool.open("/dev/shm/kv")
    pool.observe(EventPublisher("tcp://127.0.0.1:5557", replay_endpoint="tcp://127.0.0.1:5558"))

    with subscribe("tcp://127.0.0.1:5557", replay_endpoint="tcp://127.0.0.1:5558") as batches:
        for batch in batches:
            ...

Needs the packages of the extra ``store``. docs/store_admin.md describes the content of an event.
"""

try:
    from .messages import AllBlocksCleared, AnyEvent, BlockHash, BlockRemoved, BlockStored
    from .publisher import EventPublisher
    from .subscriber import EventBatch, Subscription, subscribe
except ModuleNotFoundError as missing:
    if missing.name is None or missing.name.startswith("mooncake"):
        raise
    raise ModuleNotFoundError(
        f"{__name__}: {missing.name} is not installed: pip install 'mooncake-kernels[store]'",
        name=missing.name,
    ) from None

__all__ = [
    "AllBlocksCleared",
    "AnyEvent",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventPublisher",
    "Subscription",
    "subscribe",
]
