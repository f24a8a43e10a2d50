"""Routes of pools, and of the server itself."""

from fastapi import APIRouter, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ..metrics import StoreCollector
from ..store import Store
from ..tiered import TieredStore
from .cluster import Cluster, pools_elsewhere
from .models import Evictions, EvictRequest, Health, PoolEntry, SsdEntry


def pool_routes(store: Store, cluster: Cluster | None) -> APIRouter:
    """Make ``/health``, ``/metrics``, ``/pools`` and ``/evict``."""
    routes = APIRouter(tags=["pools"])
    registry = CollectorRegistry()
    registry.register(StoreCollector(store))

    @routes.get("/health", summary="Tell whether the pool can be used")
    def health() -> Health:
        store.stats()  # takes the pool's mutex: an exception here is answered with 503
        return Health(status="ok", pool=store.pool.path)

    @routes.get("/metrics", summary="Metrics as Prometheus reads them", response_class=Response)
    def metrics() -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/pools", summary="List pools, this one first: capacity, room, fragmentation")
    def pools() -> list[PoolEntry]:
        others = [] if cluster is None else pools_elsewhere(cluster)
        return [_entry(store), *others]

    @routes.post("/evict", summary="Make room in this pool by the store's policy")
    def evict(request: EvictRequest) -> Evictions:
        evicted = store.evict(request.num_bytes)
        return Evictions(num_objects=len(evicted.keys), num_bytes=evicted.num_bytes)

    return routes


def _entry(store: Store) -> PoolEntry:
    stats = store.stats()
    return PoolEntry(
        pool=store.pool.path,
        host=None,
        capacity_bytes=stats.capacity_bytes,
        free_bytes=stats.free_bytes,
        largest_free_bytes=stats.largest_free_bytes,
        num_free_spans=stats.num_free_spans,
        fragmentation=stats.fragmentation,
        num_objects=stats.num_ready,
        num_pins=stats.num_pins,
        num_processes=stats.num_processes,
        ssd=_ssd_entry(store) if isinstance(store, TieredStore) else None,
    )


def _ssd_entry(store: TieredStore) -> SsdEntry:
    stats = store.tier.stats()
    return SsdEntry(
        path=store.tier.path,
        capacity_bytes=stats.capacity_bytes,
        live_bytes=stats.live_bytes,
        num_objects=stats.num_objects,
        num_queued=store.demotion_stats().num_queued,
        is_writable=stats.is_writable,
        error=stats.error,
    )
