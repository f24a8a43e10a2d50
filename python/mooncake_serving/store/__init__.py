"""The store: KV objects by prefix hash, shared by all processes of a host.

::

    from mooncake_serving.store import Store

    with Store.create(64 << 30, "/dev/shm/kv", namespace="llama-70b/rank0") as store:
        keys = mk.block_hashes(tokens, 256)
        num_blocks = store.match_prefix(keys)
        store.get_into_each(keys[:num_blocks], blocks)
        store.put_each(keys[num_blocks:], new_blocks, position=num_blocks)

``TieredStore`` has an ``SsdTier`` behind its pool. ``ClusterStore`` has the same calls over all
hosts whose nodes share a directory; ``Replicator`` and ``drain`` control on how many hosts an
object is. docs/store/store.md, ssd.md and cluster.md say what is guaranteed, also after a
crash, and what is still missing.
"""

import importlib
from typing import TYPE_CHECKING, Any

from mooncake_kernels.errors import Unavailable

from .eviction import (
    EvictionPolicy,
    LengthAware,
    Lfu,
    belady,
    largest_first,
    length_aware,
    lfu,
    lru,
    sieve,
)
from .keyspace import Keyspace
from .quotas import Quota, Usage, set_quota
from .ssd import SsdStats, SsdTier
from .store import ABSENT, Store
from .tiered import TieredStore
from .watermark import Watermark

if TYPE_CHECKING:
    from .cluster import ClusterStore, HotKeys, Node
    from .replication import Placement, Replicator, drain

__all__ = [
    "ABSENT",
    "ClusterStore",
    "EvictionPolicy",
    "HotKeys",
    "Keyspace",
    "LengthAware",
    "Lfu",
    "Node",
    "Placement",
    "Quota",
    "Replicator",
    "SsdStats",
    "SsdTier",
    "Store",
    "TieredStore",
    "Usage",
    "Watermark",
    "belady",
    "drain",
    "largest_first",
    "length_aware",
    "lfu",
    "lru",
    "set_quota",
    "sieve",
]

OF_CLUSTERS = {
    "ClusterStore": "cluster",
    "Replicator": "replication",
    "HotKeys": "cluster",
    "Node": "cluster",
    "Placement": "replication",
    "drain": "replication",
}


def __getattr__(name: str) -> Any:
    """Load what needs the extra ``store`` on first use."""
    if name not in OF_CLUSTERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f".{OF_CLUSTERS[name]}", __name__), name)
    except ModuleNotFoundError as error:
        if error.name != "msgspec":
            raise
        raise Unavailable(
            f"{name}: msgspec is not installed: pip install 'mooncake-kernels[store]'"
        ) from None
