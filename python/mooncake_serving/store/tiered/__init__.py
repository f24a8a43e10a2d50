"""A store of two tiers: a pool in memory, and a disk behind it."""

from .tiered_store import TieredStore

__all__ = ["TieredStore"]
