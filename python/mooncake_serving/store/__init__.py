"""The store: KV objects by prefix hash, shared by all processes of a host.

::

    from mooncake_serving.store import Store

    with Store.create(64 << 30, "/dev/shm/kv", namespace="llama-70b/rank0") as store:
        keys = mk.block_hashes(tokens, 256)
        num_blocks = store.match_prefix(keys)
        store.get_into_each(keys[:num_blocks], blocks)
        store.put_each(keys[num_blocks:], new_blocks)

``ClusterStore`` has the same calls over all hosts whose nodes share a directory. docs/store.md and
docs/store_cluster.md say what is promised, also when somebody dies, and what is still missing.
"""

from .cluster import ClusterStore
from .eviction import EvictionPolicy, largest_first, lru, sieve
from .node import Node
from .store import Store

__all__ = ["ClusterStore", "EvictionPolicy", "Node", "Store", "largest_first", "lru", "sieve"]
