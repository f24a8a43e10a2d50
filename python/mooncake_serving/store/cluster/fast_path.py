"""Reads of objects in one round trip to one other node.

This is the usual case, and small objects arrive sooner than Python gets through the modules that
serve all cases. So it has a way of its own, with as few steps as possible; whatever is unusual is
left to them.
"""

import logging
from collections.abc import Sequence

import numpy as np

from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.transfer import MAX_RPC_KEYS, Peer

from ...rpc import Peers
from ..directory import Member
from .destinations import Destination, Outcome
from .directory_entries import Locations
from .membership import Membership, PeerBackoff
from .object_rpc import ObjectRpc

logger = logging.getLogger(__name__)

NOT_READ = -1


class FastPath:
    """Reads by key from the only holder. Thread-safe.

    Args:
        peers: connections to the nodes.
        object_rpc: reads.
        locations: where objects are.
        membership: who is there.
        backoff: nodes that are not asked.
        answer_s: how long connecting may take.
    """

    def __init__(
        self,
        peers: Peers,
        object_rpc: ObjectRpc,
        locations: Locations,
        membership: Membership,
        backoff: PeerBackoff,
        answer_s: float,
    ):
        self._peers = peers
        self._object_rpc = object_rpc
        self._locations = locations
        self._membership = membership
        self._backoff = backoff
        self._answer_s = answer_s

    def read(
        self, keys: np.ndarray, destinations: Sequence[Destination], *, verify: bool
    ) -> list[bool] | None:
        """Read n objects, if it is remembered that the same node has all of them, and no other.

        Args:
            keys: ``[n, 2]``.
            destinations: n destinations.
            verify: whether what has arrived is compared with its checksum.

        Returns:
            For each whether it is in its destination; the others are to be read another way. None
            instead of a list: all are.
        """
        if len(destinations) > MAX_RPC_KEYS:
            return None
        pool = self._locations.only_pool(keys)
        member = None if pool is None else self._membership.server_of(pool)
        if member is None or member in self._backoff:
            return None
        try:
            return self._peers.use(
                member.name,
                self._answer_s,
                lambda peer: self._read_from(peer, keys, destinations, verify),
            )
        except (TransferError, Unavailable) as error:
            self._pass_over(member, error)
            return None

    def _read_from(
        self, peer: Peer, keys: np.ndarray, destinations: Sequence[Destination], verify: bool
    ) -> list[bool] | None:
        places = [
            destination.places for destination in destinations if destination.places is not None
        ]
        if len(places) < len(
            destinations
        ):  # of some the size is not known, or only a part is wanted
            outcomes = self._object_rpc.read(peer, keys, destinations, verify=verify)
            return None if outcomes is None else [outcome is Outcome.DONE for outcome in outcomes]
        sizes = self._object_rpc.read_into(peer, keys, places, verify=verify)
        if sizes is None:
            return None
        are_read = []
        for destination, size in zip(destinations, sizes.tolist(), strict=True):
            are_read.append(size != NOT_READ)
            if size != NOT_READ:
                destination.fill(size)
        return are_read

    def _pass_over(self, member: Member, error: TransferError | Unavailable) -> None:
        logger.info("%s is passed over: %s", member.name, error)
        self._backoff.failed(member, error)
