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

from typing import TYPE_CHECKING, Any

from mooncake_kernels.errors import Unavailable

from .eviction import EvictionPolicy, largest_first, lru, sieve
from .store import Store

if TYPE_CHECKING:
    from .cluster import ClusterStore
    from .node import Node

__all__ = ["ClusterStore", "EvictionPolicy", "Node", "Store", "largest_first", "lru", "sieve"]


def __getattr__(name: str) -> Any:
    """Load what needs the extra ``store`` when it is first asked for."""
    if name not in ("ClusterStore", "Node"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import cluster, node
    except ModuleNotFoundError as error:
        if error.name != "msgspec":
            raise
        raise Unavailable(
            f"{name}: msgspec is not installed: pip install 'mooncake-kernels[store]'"
        ) from None
    return cluster.ClusterStore if name == "ClusterStore" else node.Node
