"""Receives an engine's KV events, in a thread."""

import logging
import threading

from mooncake_kernels.closeable import Closeable
from mooncake_serving.store.events import subscribe

from .config import InstanceConfig
from .known_blocks import KnownBlocks

logger = logging.getLogger(__name__)

POLL_S = 0.2


class EventFeed(Closeable):
    """Applies the events of one engine until it is closed. A context manager.

    Args:
        instance: where its events come from.
        blocks: to which they are applied.

    Raises:
        InvalidArgument: an endpoint is invalid.
    """

    def __init__(self, instance: InstanceConfig, blocks: KnownBlocks):
        self._blocks = blocks
        self._subscription = subscribe(
            instance.events, topic=instance.topic, replay_endpoint=instance.replay or None
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"kv-events-{instance.name}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Stop. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        with self._subscription as subscription:
            while not self._closing.is_set():
                batch = subscription.receive(POLL_S)
                if batch is not None:
                    self._blocks.apply(batch)
