"""Engines that lend each other cache blocks (``mooncake_serving.pooling``)."""

from .engine import PooledEngine
from .errors import LoansLost

__all__ = ["LoansLost", "PooledEngine"]
