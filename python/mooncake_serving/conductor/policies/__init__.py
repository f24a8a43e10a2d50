"""Where a request is prefilled: Algorithm 1, and its baselines."""

from .baselines import LoadBalance, LocalCacheAware, Random, RoundRobin
from .interface import PrefillPolicy
from .kvcache_centric import KVCacheCentric
from .view import PrefillView

__all__ = [
    "KVCacheCentric",
    "LoadBalance",
    "LocalCacheAware",
    "PrefillPolicy",
    "PrefillView",
    "Random",
    "RoundRobin",
]
