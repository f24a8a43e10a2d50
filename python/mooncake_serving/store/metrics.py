"""Metrics of stores for Prometheus; needs the package prometheus-client.

::

    from prometheus_client import REGISTRY

    REGISTRY.register(StoreCollector(store))

There is no background work: the pool is read when Prometheus scrapes. docs/store/admin.md has the
names of all metrics.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from mooncake_kernels.errors import InvalidArgument, shown
from mooncake_kernels.extras import needed_from
from mooncake_kernels.pool import PoolCounts, PoolStats

from .ssd import SsdStats
from .store import Store
from .tiered import TieredStore
from .tiered.demotion import DemotionStats

with needed_from("store", __name__):
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

PREFIX = "mooncake_kernels_store_"
GAUGES = {  # the metric's name without its prefix: the field of PoolStats, and its help
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
COUNTERS = {  # the same for PoolCounts
    "hits": ("num_hits", "Objects that were read."),
    "misses": ("num_misses", "Objects that were to be read and were not there."),
    "stored": ("num_stored", "Objects that were stored."),
    "removed": ("num_removed", "Objects that were removed on demand, or as damaged."),
    "evicted": ("num_evicted", "Objects that were evicted to make room."),
    "read_bytes": ("read_bytes", "Bytes that were read: of a pinned object all."),
    "stored_bytes": ("stored_bytes", "Bytes of the objects that were stored."),
}
SSD_GAUGES = {  # the same for SsdStats, of stores with a disk
    "ssd_capacity_bytes": ("capacity_bytes", "Bytes of the disk's buckets."),
    "ssd_live_bytes": ("live_bytes", "Bytes of the objects on the disk."),
    "ssd_objects": ("num_objects", "Objects on the disk."),
    "ssd_free_buckets": ("num_free_buckets", "Buckets of the disk that hold nothing."),
    "ssd_is_writable": ("is_writable", "1; 0 for some time after a write failed."),
}
SSD_COUNTERS = {
    "ssd_hits": ("num_hits", "Objects that were read from the disk."),
    "ssd_stored_bytes": ("user_bytes", "Bytes of the objects that were put on the disk."),
    "ssd_written_bytes": ("written_bytes", "All bytes that went to the disk."),
    "ssd_dropped": ("num_dropped", "Objects that were given up with their bucket."),
    "ssd_damaged": ("num_damaged", "Objects that could not be read, or were damaged."),
    "ssd_write_errors": ("num_write_errors", "Writes and syncs that failed."),
}
DEMOTION_GAUGES = {  # the same for DemotionStats
    "ssd_queued": ("num_queued", "Objects that wait to be written to the disk."),
    "ssd_queued_bytes": ("queued_bytes", "Bytes of the objects that wait."),
}
DEMOTION_COUNTERS = {
    "ssd_demoted": ("num_written", "Objects that were written to the disk and evicted then."),
    "ssd_not_demoted": ("num_dropped", "Objects that left the pool and were not written."),
    "ssd_unadmitted": ("num_unadmitted", "Of these: used too little for a disk that is full."),
    "ssd_queue_full": ("num_queue_full", "Of these: the queue was full."),
    "ssd_too_large": ("num_too_large", "Of these: larger than the disk takes."),
    "ssd_unwritten": ("num_unwritten", "Of these: the disk could not write them."),
    "ssd_damaged_in_pool": ("num_damaged", "Of these: damaged in the pool."),
    "ssd_removed_in_queue": ("num_removed", "Of these: removed, or replaced, while queued."),
}
ANSWER_S = 1.0  # of a pool; a scrape of Prometheus has 10 s
UP = "1; 0 while a process that was stopped during a change holds the pool."
REPAIRS = "Times that a process died in the middle of a change."


class StoreCollector:
    """A collector of Prometheus. Thread-safe. A closed store is left out, and forgotten.

    Args:
        stores: whose pools are reported; the label ``pool`` is their path. ``add`` adds more later.

    Raises:
        InvalidArgument: one is no store, or two open ones have the same pool; then none is added.
    """

    def __init__(self, *stores: Store):
        self._lock = threading.Lock()
        self._stores: dict[str, Store] = {}
        self.add(*stores)

    def add(self, *stores: Store) -> None:
        """Report the pools of these stores, too."""
        with self._lock:
            known = self._open_stores()
            for i, store in enumerate(stores):
                if not isinstance(store, Store):
                    raise InvalidArgument(
                        f"StoreCollector: stores[{i}] must be a Store, got {shown(store)}"
                    )
                if known.setdefault(store.pool.path, store) is not store:
                    raise InvalidArgument(
                        "StoreCollector: stores must have pools of their own, got two of "
                        f"{store.pool.path}"
                    )
            self._stores = known

    def collect(self) -> Iterator[Metric]:
        """Return the current metrics; Prometheus calls it."""
        pools: dict[str, PoolStats] = {}
        up: dict[str, bool] = {}
        counts: dict[str, PoolCounts] = {}
        disks: dict[str, SsdStats] = {}
        demotions: dict[str, DemotionStats] = {}
        with self._lock:
            self._stores = stores = self._open_stores()
        for path, store in stores.items():
            stats = None
            try:
                counted = store.pool.counts()
                with contextlib.suppress(TimeoutError):
                    stats = store.pool.stats(ANSWER_S)
                if isinstance(store, TieredStore):
                    disks[path] = store.tier.stats()
                    demotions[path] = store.demotion_stats()
            except InvalidArgument:  # it was closed
                continue
            if stats is not None:
                pools[path] = stats
            up[path], counts[path] = path in pools, counted
        yield _family(GaugeMetricFamily, "up", UP, up)
        yield from _families(GaugeMetricFamily, GAUGES, pools)
        yield from _families(CounterMetricFamily, COUNTERS, counts)
        if disks:
            yield from _families(GaugeMetricFamily, SSD_GAUGES, disks)
            yield from _families(CounterMetricFamily, SSD_COUNTERS, disks)
            yield from _families(GaugeMetricFamily, DEMOTION_GAUGES, demotions)
            yield from _families(CounterMetricFamily, DEMOTION_COUNTERS, demotions)
        repairs = {path: stats.num_repairs for path, stats in pools.items()}
        yield _family(CounterMetricFamily, "repairs", REPAIRS, repairs)

    def _open_stores(self) -> dict[str, Store]:
        return {path: store for path, store in self._stores.items() if not store.closed}


def _families(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    fields: Mapping[str, tuple[str, str]],
    values: Mapping[str, Any],
) -> Iterator[Metric]:
    """A metric family for each field of the stores' values, by pool."""
    for name, (field, text) in fields.items():
        yield _family(
            kind, name, text, {path: getattr(value, field) for path, value in values.items()}
        )


def _family(
    kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
    name: str,
    text: str,
    values: Mapping[str, float],
) -> Metric:
    family = kind(PREFIX + name, text, labels=["pool"])
    for path, value in values.items():
        family.add_metric([path], value)
    return family
