"""Which processes take part in a store, and which pools have which objects."""

from .base import MAX_KEYS, Claim, Directory, Holders, Member
from .embedded import EmbeddedDirectory

__all__ = ["MAX_KEYS", "Claim", "Directory", "EmbeddedDirectory", "Holders", "Member"]
