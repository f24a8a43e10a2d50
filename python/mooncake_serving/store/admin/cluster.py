"""Routes of a cluster: its members, and draining one of them."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol, runtime_checkable

from fastapi import APIRouter, HTTPException, Query, Response

from mooncake_kernels.pool import Key

from ..directory import Member
from .models import DrainProgress, DrainRequest, MemberEntry, NotHere, PoolEntry

DrainState = Literal["idle", "draining", "left", "failed"]
NO_DIRECTORY = "this store has no directory: it is of one host"


@dataclass(frozen=True)
class Draining:
    """How far a node is with moving its objects elsewhere.

    Attributes:
        state: "idle": not requested, or stopped; "left": done, and the node has left the cluster;
            "failed": some objects could not be moved, or ``error`` ended the drain.
        num_moved: objects that other pools have now and this one no longer has.
        num_left: objects still here, as of the last batch.
        num_failed: objects that could not be moved.
        error: the error that ended the drain.
        is_accepting: whether the node takes new objects; not after a drain that failed.
        num_on_disk: other objects, which only the disk behind the pool has.
        num_gone: objects that went meanwhile without being moved.
    """

    state: DrainState
    num_moved: int
    num_left: int
    num_failed: int
    error: str | None
    is_accepting: bool
    num_on_disk: int = 0
    num_gone: int = 0


@runtime_checkable
class Cluster(Protocol):
    """What the routes need from a cluster."""

    def members(self) -> Sequence[Member]:
        """All live members, as last reported."""

    def own_name(self) -> str:
        """Name of this store's node, which may have left."""

    def own_pool(self) -> str:
        """Name of this store's pool in the cluster."""

    def withdraw(self, key: Key) -> None:
        """Tell the cluster that this store's pool no longer has an object."""

    def drain(self, name: str, *, leave_disk: bool = False) -> None:
        """Start moving a member's objects elsewhere; from now on it accepts no new objects.
        ``leave_disk``: what only the disk behind its pool has stays there.

        Raises:
            NotImplementedError: it is not possible; the message says why.
        """

    def cancel_drain(self, name: str) -> None:
        """Have a member accept new objects again, and stop moving what it has, after the current
        batch.

        Raises:
            NotImplementedError: it is not possible; the message says why.
        """

    def draining(self) -> Draining:
        """Progress of this node."""


def cluster_routes(cluster: Cluster | None) -> APIRouter:
    """Make ``/members`` and ``/drain``, which answer 501 without a cluster."""
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
        _check_member(known, request.node)
        try:
            known.drain(request.node, leave_disk=request.leave_disk)
        except NotImplementedError as reason:
            raise NotHere(str(reason)) from None
        return Response(status_code=202)

    @routes.delete("/drain", status_code=202, summary="Let a member stay, with what it still has")
    def cancel_drain(node: Annotated[str, Query(min_length=1)]) -> Response:
        known = _known(cluster)
        _check_member(known, node)
        try:
            known.cancel_drain(node)
        except NotImplementedError as reason:
            raise NotHere(str(reason)) from None
        return Response(status_code=202)

    @routes.get("/drain", summary="Tell how far this node is")
    def draining() -> DrainProgress:
        return DrainProgress(**dataclasses.asdict(_known(cluster).draining()))

    return routes


def pools_elsewhere(cluster: Cluster) -> list[PoolEntry]:
    """Entries of the other pools, as their members last reported."""
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


def _check_member(cluster: Cluster, name: str) -> None:
    if name == cluster.own_name():  # without asking the directory, which may not answer
        return
    if name not in [member.name for member in cluster.members()]:
        raise HTTPException(404, f"there is no member {name}")


def _known(cluster: Cluster | None) -> Cluster:
    if cluster is None:
        raise NotHere(NO_DIRECTORY)
    return cluster
