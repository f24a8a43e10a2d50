"""What the connector counts, in vLLM's log and its Prometheus metrics."""

from typing import Any

from prometheus_client import Counter, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from .steps import LOAD_TIMES

COUNTERS = {
    "loads": "Loads of a request's prefix from the store that ended, by each worker.",
    "failed_loads": "Those of which a block did not come.",
    "loaded_blocks": "Blocks loaded from the store, of all workers.",
    "loaded_bytes": "Their bytes.",
    "saved_blocks": "Blocks saved to the store, of all workers.",
    "saved_bytes": "Their bytes.",
    "save_seconds": "Seconds that threads spent to save them.",
    "unsaved_blocks": "Blocks that were not saved because the store was slower than the engine.",
}
SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)


class StoreStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there
    """Counts since the last report: ``data`` has those of ``COUNTERS``, and under ``LOAD_TIMES``
    the seconds of each load.
    """

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        counts = {name: self.data.get(name, 0) for name in COUNTERS}
        times = sorted(self.data.get(LOAD_TIMES, ()))
        return {
            "loads": counts["loads"],
            "failed loads": counts["failed_loads"],
            "loaded MB": round(counts["loaded_bytes"] / 1e6, 1),
            "median load ms": round(1e3 * times[len(times) // 2], 1) if times else 0,
            "longest load ms": round(1e3 * times[-1], 1) if times else 0,
            "saved MB": round(counts["saved_bytes"] / 1e6, 1),
            "unsaved blocks": counts["unsaved_blocks"],
        }


class StoreMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """A counter for each of ``COUNTERS``, and a histogram of how long loads take."""

    def __init__(self, vllm_config: Any, metric_types: Any, labels: list[str], values: Any):
        super().__init__(vllm_config, metric_types, labels, values)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        self._counters = {
            name: self._of_engines(
                counter(name=f"vllm:mooncake_kernels_{name}", documentation=text, labelnames=labels)
            )
            for name, text in COUNTERS.items()
        }
        self._times = self._of_engines(
            histogram(
                name="vllm:mooncake_kernels_load_seconds",
                documentation="Seconds from the begin of a load to its end, by each worker.",
                buckets=SECONDS,
                labelnames=labels,
            )
        )

    def _of_engines(self, metric: Any) -> dict[int, Any]:
        return {i: metric.labels(*values) for i, values in self.per_engine_labelvalues.items()}

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, counters in self._counters.items():
            counters[engine_idx].inc(transfer_stats_data.get(name, 0))
        for seconds in transfer_stats_data.get(LOAD_TIMES, ()):
            self._times[engine_idx].observe(seconds)
