"""How many hosts have an object, and which: placing, making and restoring copies."""

from .draining import drain
from .placement import Placement
from .replicator import Replicator

__all__ = ["Placement", "Replicator", "drain"]
