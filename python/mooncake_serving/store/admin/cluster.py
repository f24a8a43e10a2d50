"""Routes of a cluster: who takes part, and sending one of them home."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from fastapi import APIRouter, HTTPException, Response

from mooncake_kernels.pool import Key

from ..directory import Member
from .errors import NotHere
from .models import DrainProgress, DrainRequest, MemberEntry, PoolEntry

DrainState = Literal["idle", "draining", "left", "failed"]
NO_DIRECTORY = "this store has no directory: it is of one host"


@dataclass(frozen=True)
class Draining:
    """How far a node is with moving its objects elsewhere.

    Attributes:
        state: "idle": nobody asked for it, or it was stopped; "left": it is done, and the node has
            left the cluster; "failed": some could not be moved, or ``error`` ended it.
        num_moved: objects that other pools have now, and this one has not.
        num_left: objects that are still here, as of the last batch.
        num_failed: objects that could not be moved.
        error: what ended it.
    """

    state: DrainState
    num_moved: int
    num_left: int
    num_failed: int
    error: str | None


class Cluster(Protocol):
    """What the routes need of a cluster."""

    def members(self) -> Sequence[Member]:
        """All who live, as far as was heard."""

    def own_pool(self) -> str:
        """The name by which the cluster knows the pool of this store."""

    def withdraw(self, key: Key) -> None:
        """Say that the pool of this store does not have an object any more."""

    def drain(self, name: str) -> None:
        """Begin to move what a member has elsewhere; it takes no new objects from now on.

        Raises:
            NotImplementedError: it cannot be done; the message says why.
        """

    def draining(self) -> Draining:
        """How far this node is."""


def cluster_routes(cluster: Cluster | None) -> APIRouter:
    """Make ``/members`` and ``/drain``, which say 501 where there is no cluster."""
    routes = APIRouter(tags=["cluster"])

    @routes.get("/members", summary="List the members that live")
    def members() -> list[MemberEntry]:
        return [
            MemberEntry(
                name=member.name,
                host=member.host,
                pool=member.pool,
                capacity_bytes=member.capacity_bytes,
                free_bytes=member.free_bytes,
                is_draining=member.is_draining,
            )
            for member in _known(cluster).members()
        ]

    @routes.post("/drain", status_code=202, summary="Move what a member has elsewhere")
    def drain(request: DrainRequest) -> Response:
        known = _known(cluster)
        if request.node not in [member.name for member in known.members()]:
            raise HTTPException(404, f"there is no member {request.node}")
        try:
            known.drain(request.node)
        except NotImplementedError as reason:
            raise NotHere(str(reason)) from None
        return Response(status_code=202)

    @routes.get("/drain", summary="Tell how far this node is")
    def draining() -> DrainProgress:
        return DrainProgress(**dataclasses.asdict(_known(cluster).draining()))

    return routes


def pools_elsewhere(cluster: Cluster) -> list[PoolEntry]:
    """What is known of the other pools: what their members last said."""
    own = cluster.own_pool()
    by_name = {member.pool: member for member in cluster.members() if member.pool not in ("", own)}
    return [
        PoolEntry(
            pool=name,
            host=member.host,
            capacity_bytes=member.capacity_bytes,
            free_bytes=member.free_bytes,
            largest_free_bytes=None,
            num_free_spans=None,
            fragmentation=None,
            num_objects=None,
            num_pins=None,
            num_processes=None,
            ssd=None,
        )
        for name, member in sorted(by_name.items())
    ]


def _known(cluster: Cluster | None) -> Cluster:
    if cluster is None:
        raise NotHere(NO_DIRECTORY)
    return cluster
