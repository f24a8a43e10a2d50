"""How many hosts have an object, and which: placing, making and restoring copies."""

from .draining import drain
from .placement import Placement
from .replicate import ANYWHERE, drop_from
from .replicator import Replicator

__all__ = ["ANYWHERE", "Placement", "Replicator", "drain", "drop_from"]
