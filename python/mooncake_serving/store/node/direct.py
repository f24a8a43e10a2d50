"""Reads whole objects that one other node has, straight into memory.

This is the usual case, and small objects arrive sooner than Python gets through ``remote.py``,
which serves all cases: so it has a way of its own, with as few steps as possible.
"""

import logging
from collections.abc import Callable, Sequence

import numpy as np

from mooncake_kernels.errors import TransferError, Unavailable
from mooncake_kernels.transfer import MAX_ASKED_KEYS

from ...rpc import Peers
from ..directory import Member
from .by_key import ByKey
from .locations import Locations
from .silence import Silence
from .sinks import Sink

logger = logging.getLogger(__name__)

NOT_READ = -1


class DirectReads:
    """Reads by key from the only holder. Thread-safe.

    Args:
        peers: connections to the holders.
        by_key: reads from them.
        locations: where objects are.
        server_of: the only member that serves the pool of a name; None if there is none, or more.
        silence: holders that are not asked.
        answer_s: how long connecting may take.
    """

    def __init__(
        self,
        peers: Peers,
        by_key: ByKey,
        locations: Locations,
        server_of: Callable[[str], Member | None],
        silence: Silence,
        answer_s: float,
    ):
        self._peers = peers
        self._by_key = by_key
        self._locations = locations
        self._server_of = server_of
        self._silence = silence
        self._answer_s = answer_s

    def read(self, keys: np.ndarray, sinks: Sequence[Sink], *, verify: bool) -> np.ndarray | None:
        """Read n objects, if it is remembered that the same node has all of them, and no other.

        Args:
            keys: ``[n, 2]``.
            sinks: n destinations.
            verify: whether what has arrived is compared with its checksum.

        Returns:
            ``[n]`` int64: sizes of the objects that are in their sinks' places; -1: it is to be
            read another way. None: all are.
        """
        places = [sink.places for sink in sinks]
        if None in places or not 0 < len(places) <= MAX_ASKED_KEYS:
            return None
        pool = self._locations.only_pool(keys)
        member = None if pool is None else self._server_of(pool)
        if member is None or member.name in self._silence:
            return None
        try:
            with self._peers.lease(member.name, self._answer_s) as peer:
                return self._by_key.read_into(peer, keys, places, verify=verify)
        except (TransferError, Unavailable) as error:
            logger.info("%s is passed over: %s", member.name, error)
            self._silence.note(member.name, error)
            return None
