"""Where copies of blocks are: hot ones on more instances, cold ones on a slower tier or gone."""

from .heat import Heat
from .replicate import ReplicaPolicy, Replicate
from .swap import CachedBlock, Swap, SwapAction, choose_swaps

__all__ = [
    "CachedBlock",
    "Heat",
    "ReplicaPolicy",
    "Replicate",
    "Swap",
    "SwapAction",
    "choose_swaps",
]
