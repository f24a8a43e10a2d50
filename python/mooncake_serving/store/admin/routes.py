"""Routes of objects, of pools, of the server itself, and of a cluster."""

import dataclasses
from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from ..keyspace import key_text, parse_key
from ..metrics import StoreCollector
from ..object_list import ListedObject, find_object, list_objects
from ..store import Store
from ..tiered import TieredStore
from .cluster import Cluster
from .models import (
    DrainProgress,
    DrainRequest,
    Evictions,
    EvictRequest,
    Health,
    KeyText,
    MemberEntry,
    ObjectEntry,
    ObjectPage,
    PoolEntry,
    SsdEntry,
)

MAX_PAGE = 10_000


def object_routes(store: Store, cluster: Cluster | None) -> APIRouter:
    """Make the routes below ``/objects``, which list every object, and do not count as uses."""
    routes = APIRouter(prefix="/objects", tags=["objects"])

    @routes.get("", summary="List objects of all namespaces, page by page")
    def objects(
        prefix: Annotated[str, Query(description="digits with which their keys begin")] = "",
        after: Annotated[str | None, Query(description="`next` of the page before")] = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 1000,
    ) -> ObjectPage:
        last = None if after is None else parse_key("objects", after, argument="after")
        page = list_objects(store.pool, prefix=prefix, after=last, limit=limit)
        entries = [_entry(found) for found in page.objects]
        is_last = page.num_left == len(entries)
        return ObjectPage(objects=entries, next=None if is_last else entries[-1].key)

    @routes.get("/{key}", summary="Look at one object", description="HEAD does, too.")
    def look(key: KeyText) -> ObjectEntry:
        return _entry(_found(store, key))

    @routes.head("/{key}", include_in_schema=False)
    def look_head(key: KeyText) -> Response:
        _found(store, key)
        return Response(media_type="application/json")

    @routes.delete("/{key}", status_code=204, summary="Remove one object of this pool and its disk")
    def remove(key: KeyText) -> None:
        words = parse_key("objects", key)
        if not store.remove_key(words):
            raise _missing(key)
        if cluster is not None:
            cluster.withdraw(words)

    return routes


def _found(store: Store, key: str) -> ListedObject:
    found = find_object(store.pool, parse_key("objects", key))
    if found is None:
        raise _missing(key)
    return found


def _entry(found: ListedObject) -> ObjectEntry:
    return ObjectEntry(
        key=key_text(found.key),
        num_bytes=found.num_bytes,
        retention=found.retention,
        recency=found.recency,
    )


def _missing(key: str) -> HTTPException:
    return HTTPException(404, f"there is no object {key}")


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
        others = [] if cluster is None else _pools_elsewhere(cluster)
        return [_pool_entry(store), *others]

    @routes.post("/evict", summary="Make room in this pool by the store's policy")
    def evict(request: EvictRequest) -> Evictions:
        evicted = store.evict(request.num_bytes)
        return Evictions(num_objects=len(evicted.keys), num_bytes=evicted.num_bytes)

    return routes


def _pool_entry(store: Store) -> PoolEntry:
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


def cluster_routes(cluster: Cluster | None) -> APIRouter:
    """Make ``/members`` and ``/drain``, which answer 501 without a cluster."""
    routes = APIRouter(tags=["cluster"])

    @routes.get("/members", summary="List the members that live")
    def members() -> list[MemberEntry]:
        names = MemberEntry.model_fields
        return [
            MemberEntry(**{name: getattr(member, name) for name in names})
            for member in _known(cluster).members()
        ]

    @routes.post("/drain", status_code=202, summary="Move what a member has elsewhere")
    def drain(request: DrainRequest) -> Response:
        known = _known(cluster)
        _check_member(known, request.node)
        known.drain(request.node, leave_disk=request.leave_disk)
        return Response(status_code=202)

    @routes.delete("/drain", status_code=202, summary="Let a member stay, with what it still has")
    def cancel_drain(node: Annotated[str, Query(min_length=1)]) -> Response:
        known = _known(cluster)
        _check_member(known, node)
        known.cancel_drain(node)
        return Response(status_code=202)

    @routes.get("/drain", summary="Tell how far this node is")
    def draining() -> DrainProgress:
        return DrainProgress(**dataclasses.asdict(_known(cluster).draining()))

    return routes


def _pools_elsewhere(cluster: Cluster) -> list[PoolEntry]:
    """Entries of the other pools, as their members last reported."""
    own = cluster.own_pool()
    by_name = {member.pool: member for member in cluster.members() if member.pool not in ("", own)}
    unknown = dict.fromkeys(PoolEntry.model_fields)
    return [
        PoolEntry.model_validate(
            {
                **unknown,
                "pool": name,
                "host": member.host,
                "capacity_bytes": member.capacity_bytes,
                "free_bytes": member.free_bytes,
            }
        )
        for name, member in sorted(by_name.items())
    ]


def _check_member(cluster: Cluster, name: str) -> None:
    if name == cluster.own_name():  # without asking the directory, which may not answer
        return
    if name not in [member.name for member in cluster.members()]:
        raise HTTPException(404, f"there is no member {name}")


def _known(cluster: Cluster | None) -> Cluster:
    if cluster is None:
        raise NotImplementedError("this store has no directory: it is of one host")
    return cluster
