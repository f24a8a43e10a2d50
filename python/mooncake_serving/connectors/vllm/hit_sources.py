"""What vLLM's metrics call the place that cached tokens came from."""

from typing import Any

HIT_SOURCES: dict[str, Any] = {}  # by the scheme of a store's URL; vLLM before 0.32 does not ask
try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    pass
else:
    HIT_SOURCES = {
        "shm": CacheHitSource.HOST,
        "tiered": CacheHitSource.DISK,
        "redis": CacheHitSource.EXTERNAL_UNSPECIFIED,
    }
