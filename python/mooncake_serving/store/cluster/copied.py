"""Publish objects that were copied from other pools into this node's."""

import logging
from collections.abc import Sequence

import numpy as np

from mooncake_kernels.pool import PutResult

from ..store import Store
from .destinations import PoolDestination
from .directory_entries import DirectoryEntries

logger = logging.getLogger(__name__)

GONE = "it was removed meanwhile"


def keep_copies(
    store: Store,
    entries: DirectoryEntries,
    keys: np.ndarray,
    destinations: Sequence[PoolDestination],
) -> list[int]:
    """Publish those of n objects read into the pool that are still here, with its ``copies``.

    Objects that were removed meanwhile are taken back, and then have no result.

    Returns:
        Which are still here.
    """
    is_new = np.array(
        [destination.result is PutResult.STORED for destination in destinations], bool
    )
    is_old = np.array(
        [destination.result is PutResult.EXISTS for destination in destinations], bool
    )
    store.age_tail_first(keys[is_new])
    here = np.flatnonzero(is_new | is_old)
    gone = here[~entries.publish_copies(keys[here])].tolist()
    for i in gone:
        try:
            destinations[i].retract()
        except OSError as error:  # a stopped process holds the pool; the next look does it
            logger.warning("what was removed is still here: %s", error)
            entries.is_stale = True
    return gone
