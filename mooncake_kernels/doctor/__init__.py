"""The preconditions of the fast paths on a machine: their state, and the commands to fix them."""

from .examine import examine
from .finding import Finding, State
from .here import Here, Library
from .look import look

__all__ = ["Finding", "Here", "Library", "State", "examine", "look"]
