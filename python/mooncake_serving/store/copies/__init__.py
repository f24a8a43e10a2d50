"""How many hosts have an object, and which: placing, making and restoring copies."""

from .copies import Copies
from .draining import drain
from .placement import Placement

__all__ = ["Copies", "Placement", "drain"]
