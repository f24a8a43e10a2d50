"""Where copies of blocks go: hot ones to more instances, cold ones to a slower tier or dropped."""

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
