"""A store of two tiers: a pool in memory, and behind it a disk."""

from .tiered_store import TieredStore

__all__ = ["TieredStore"]
