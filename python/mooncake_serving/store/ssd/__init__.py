"""The SSD tier of the store: objects in a file on a local disk, see docs/store/ssd.md."""

from .layout import FIRST_BUCKET
from .stats import SsdStats
from .tier import SsdTier

__all__ = ["FIRST_BUCKET", "SsdStats", "SsdTier"]
