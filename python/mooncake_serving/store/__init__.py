"""The store: KV objects by prefix hash, shared by all processes of a host.

::

    from mooncake_serving.store import Store

    with Store.create(64 << 30, "/dev/shm/kv", namespace="llama-70b/rank0") as store:
        keys = mk.block_hashes(tokens, 256)
        num_blocks = store.match_prefix(keys)
        store.get_into_each(keys[:num_blocks], blocks)
        store.put_each(keys[num_blocks:], new_blocks, position=num_blocks)

``ClusterStore`` has the same calls over all hosts whose nodes share a directory. docs/store.md and
docs/store_cluster.md say what is promised, also when somebody dies, and what is still missing.
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
from .observer import ObservedPool, Observer
from .quotas import Quota, Usage
from .store import Store
from .watermark import Watermark

if TYPE_CHECKING:
    from .cluster import ClusterStore
    from .node import Node

__all__ = [
    "ClusterStore",
    "EvictionPolicy",
    "LengthAware",
    "Lfu",
    "Node",
    "ObservedPool",
    "Observer",
    "Quota",
    "Store",
    "Usage",
    "Watermark",
    "belady",
    "largest_first",
    "length_aware",
    "lfu",
    "lru",
    "sieve",
]

_NEEDS_EXTRA = {"ClusterStore": "cluster", "Node": "node"}  # and in which module it is


def __getattr__(name: str) -> Any:
    """Load what needs the extra ``store`` when it is first asked for."""
    if name not in _NEEDS_EXTRA:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_NEEDS_EXTRA[name]}", __name__)
    except ModuleNotFoundError as error:
        if error.name != "msgspec":
            raise
        raise Unavailable(
            f"{name}: msgspec is not installed: pip install 'mooncake-kernels[store]'"
        ) from None
    return getattr(module, name)
