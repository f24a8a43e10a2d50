"""The preconditions of the fast paths on a machine: their state, and the commands to fix them."""

from .examine import examine
from .finding import Finding, State
from .here import Here, Library
from .inspect import inspect

__all__ = ["Finding", "Here", "Library", "State", "examine", "inspect"]
