"""What Prometheus reads of an engine, by vLLM's names."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from .worker import Worker


class EngineMetrics(Collector):
    """Reads a worker's numbers when it is asked for them.

    Args:
        worker: whose.
    """

    def __init__(self, worker: Worker):
        self._worker = worker
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """Return all of them as text."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Nothing: ``collect`` is not called before a scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Return the numbers as they are now."""
        worker, counts = self._worker, self._worker.counts
        engine, cache = worker.engine, worker.engine.cache
        labels = {"block_size": cache.block_size, "num_gpu_blocks": cache.num_blocks}
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "the form of the KV cache", labels=[*labels]
        )
        info.add_metric([str(value) for value in labels.values()], 1)
        yield info
        used = 1 - counts.num_free_blocks / cache.num_blocks
        for name, text, value in (
            ("num_requests_running", "requests in the batch", engine.num_running),
            ("num_requests_waiting", "requests that compute nothing yet", worker.num_waiting),
            ("kv_cache_usage_perc", "share of the blocks that requests hold", used),
        ):
            yield GaugeMetricFamily(f"vllm:{name}", text, value)
        for name, text, value in (
            ("prompt_tokens", "of prompts whose requests ended", counts.prompt_tokens),
            ("prefix_cache_queries", "tokens that were looked for", counts.prompt_tokens),
            ("prefix_cache_hits", "those of them that were there", counts.cached_tokens),
            ("generation_tokens", "tokens generated", counts.generated_tokens),
            ("kv_transfer_failures", "prompts that were not handed over", counts.failed_transfers),
        ):
            yield CounterMetricFamily(f"vllm:{name}", text, value)
        for name, text, value in (
            ("refusals", "requests that found the queue full", counts.refused),
            ("similar_tokens", "of prompts, begun from a similar prompt's", counts.similar_tokens),
        ):
            yield CounterMetricFamily(f"mooncake_engine_{name}", text, value)
        finished = CounterMetricFamily(
            "vllm:request_success", "requests that ended, by reason", labels=["finished_reason"]
        )
        for reason, count in [*counts.finished.items()]:
            finished.add_metric([reason], count)
        yield finished
