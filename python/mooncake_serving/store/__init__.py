"""The store: KV objects by prefix hash, shared by all processes of a host.

::

    from mooncake_serving.store import Store

    with Store.create(64 << 30, "/dev/shm/kv", namespace="llama-70b/rank0") as store:
        keys = mk.block_hashes(tokens, 256)
        num_blocks = store.match_prefix(keys)
        store.get_into_each(keys[:num_blocks], blocks)
        store.put_each(keys[num_blocks:], new_blocks)

``TieredStore`` has an ``SsdTier`` behind its pool. docs/store.md and docs/store_ssd.md say what is
promised, also when processes die, and what is still missing: other hosts and replicas.
"""

from .eviction import EvictionPolicy, largest_first, lru, sieve
from .ssd import SsdStats, SsdTier
from .store import Store
from .tiered import TieredStore

__all__ = [
    "EvictionPolicy",
    "SsdStats",
    "SsdTier",
    "Store",
    "TieredStore",
    "largest_first",
    "lru",
    "sieve",
]
