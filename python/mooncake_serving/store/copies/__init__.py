"""How many hosts have an object, and which: placement, copies that are made and made good."""

from .copies import Copies
from .draining import drain
from .placement import Placement

__all__ = ["Copies", "Placement", "drain"]
