"""Metrics of stores for Prometheus; needs the package prometheus-client.

::

    from prometheus_client import REGISTRY

    REGISTRY.register(StoreCollector(store))

Nothing runs in between: the pool is looked at when Prometheus scrapes. docs/store_admin.md has the
names of all metrics.
"""

import threading
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from mooncake_kernels.errors import InvalidArgument
from mooncake_kernels.pool import PoolStats

from .counters import Counts, read_counts
from .store import Store

PREFIX = "mooncake_kernels_store_"
GAUGES = {  # the rest of a metric's name: the field of PoolStats, and what it says
    "capacity_bytes": ("capacity_bytes", "Bytes for objects."),
    "free_bytes": ("free_bytes", "Bytes that are in no object."),
    "largest_free_bytes": ("largest_free_bytes", "The largest object that fits."),
    "free_spans": ("num_free_spans", "Parts in which the free bytes lie."),
    "fragmentation": ("fragmentation", "1 - largest part / free bytes."),
    "max_objects": ("max_objects", "Objects that there can be."),
    "objects": ("num_ready", "Objects that can be read."),
    "objects_being_written": ("num_writing", "Objects that are being written."),
    "doomed_objects": ("num_doomed", "Objects that were removed and are still being read."),
    "doomed_bytes": ("doomed_bytes", "Bytes of the doomed objects."),
    "pins": ("num_pins", "Objects that are being read, each as often as it is."),
    "processes": ("num_processes", "Processes that have the pool open."),
}
COUNTERS = {  # the same of Counts
    "hits": ("num_hits", "Objects that were read."),
    "misses": ("num_misses", "Objects that were to be read and were not there."),
    "stored": ("num_stored", "Objects that were stored."),
    "removed": ("num_removed", "Objects that were removed on demand, or as damaged."),
    "evicted": ("num_evicted", "Objects that were evicted to make room."),
    "read_bytes": ("read_bytes", "Bytes of the objects that were read."),
    "stored_bytes": ("stored_bytes", "Bytes of the objects that were stored."),
}
REPAIRS = "Times that a process died in the middle of a change."


class StoreCollector:
    """A collector of Prometheus. Thread-safe. One that was closed is left out.

    Args:
        stores: whose pools; the label ``pool`` is their path. ``add`` takes more later.

    Raises:
        InvalidArgument: two have one pool.
    """

    def __init__(self, *stores: Store):
        self._lock = threading.Lock()
        self._stores: dict[str, Store] = {}
        self.add(*stores)

    def add(self, *stores: Store) -> None:
        """Report these stores' pools, too."""
        with self._lock:
            for store in stores:
                if self._stores.setdefault(store.pool.path, store) is not store:
                    raise InvalidArgument(
                        "StoreCollector: stores must have pools of their own, got two of "
                        f"{store.pool.path}"
                    )

    def collect(self) -> Iterator[Metric]:
        """Return the metrics as they are now; who scrapes calls it."""
        seen: dict[str, tuple[PoolStats, Counts]] = {}
        with self._lock:
            stores = list(self._stores.items())
        for path, store in stores:
            try:
                seen[path] = store.stats(), read_counts(path)
            except InvalidArgument:  # it was closed
                continue
        for name, (field, text) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=["pool"])
            for path, (stats, _) in seen.items():
                gauge.add_metric([path], getattr(stats, field))
            yield gauge
        for name, (field, text) in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=["pool"])
            for path, (_, counts) in seen.items():
                counter.add_metric([path], getattr(counts, field))
            yield counter
        repairs = CounterMetricFamily(PREFIX + "repairs", REPAIRS, labels=["pool"])
        for path, (stats, _) in seen.items():
            repairs.add_metric([path], stats.num_repairs)
        yield repairs
