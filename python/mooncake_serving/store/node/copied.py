"""What becomes of objects that were copied from other pools into the own one."""

import logging
from collections.abc import Sequence

import numpy as np

from mooncake_kernels.pool import PutResult

from ..store import Store
from .listing import Listing
from .sinks import IntoPool

logger = logging.getLogger(__name__)

GONE = "it was removed meanwhile"


def keep_copies(
    store: Store, listing: Listing, keys: np.ndarray, sinks: Sequence[IntoPool]
) -> list[int]:
    """Publish what is here now of n objects that were read into the pool, with its ``copies``.

    What was removed meanwhile is taken back, and has no result then.

    Returns:
        Which these are.
    """
    is_new = np.array([sink.result is PutResult.STORED for sink in sinks], bool)
    is_old = np.array([sink.result is PutResult.EXISTS for sink in sinks], bool)
    store.age_tail_first(keys[is_new])
    here = np.flatnonzero(is_new | is_old)
    gone = here[~listing.publish_copies(keys[here])].tolist()
    for i in gone:
        try:
            sinks[i].retract()
        except OSError as error:  # a stopped process holds the pool; a look does it later
            logger.warning("what was removed is still here: %s", error)
            listing.is_stale = True
    return gone
