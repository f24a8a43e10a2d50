"""Every precondition of the fast paths on a machine: its state, and the command that fixes it."""

from .examine import examine
from .finding import Finding, State
from .here import Here, Library
from .look import look

__all__ = ["Finding", "Here", "Library", "State", "examine", "look"]
