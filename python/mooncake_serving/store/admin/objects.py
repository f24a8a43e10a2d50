"""Routes of objects. They list every object of the pool, and do not count as uses."""

from typing import Annotated

from fastapi import APIRouter, HTTPException, Query, Response

from ..keyspace import key_text, parse_key
from ..object_list import ListedObject, find_object, list_objects
from ..store import Store
from .cluster import Cluster
from .models import KeyText, ObjectEntry, ObjectPage

MAX_PAGE = 10_000


def object_routes(store: Store, cluster: Cluster | None) -> APIRouter:
    """Make the routes below ``/objects``."""
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
