"""KV events, for routers that track which pool has what: published over ZeroMQ in vLLM's format.

::

    publisher = EventPublisher("tcp://127.0.0.1:5557", replay_endpoint="tcp://127.0.0.1:5558")
    events = StoreEvents(Store.open("/dev/shm/kv"), publisher)

    with subscribe("tcp://127.0.0.1:5557", replay_endpoint="tcp://127.0.0.1:5558") as batches:
        for batch in batches:
            ...

Needs the packages of the extra ``store``. docs/store/admin.md describes the content of an event.
"""

from mooncake_kernels.extras import needed_from

with needed_from("store", __name__):
    from .messages import AllBlocksCleared, AnyEvent, BlockHash, BlockRemoved, BlockStored
    from .publisher import EventPublisher
    from .store_events import StoreEvents
    from .subscriber import EventBatch, Subscription, subscribe

__all__ = [
    "AllBlocksCleared",
    "AnyEvent",
    "BlockHash",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "EventPublisher",
    "StoreEvents",
    "Subscription",
    "subscribe",
]
