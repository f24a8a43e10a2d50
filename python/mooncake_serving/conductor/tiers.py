"""Where instances have the blocks that they hold: what must be loaded, and if it is worth that."""

from typing import Protocol

import numpy as np

from .request import Request


class Tiers(Protocol):
    """Knows what of an instance's cache is in a tier that takes time to read, as an SSD does."""

    def look(self, request: Request, matched_blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tell what of a request's prefix each instance would reuse, and how long it reads that.

        Args:
            request: to be placed.
            matched_blocks: ``[num_instances]``, the longest prefix that each one holds.

        Returns:
            ``[num_instances]`` blocks, as many or fewer: without what is faster computed anew than
            loaded; and ``[num_instances]`` seconds that it takes to load these, beside computation.
        """
        ...


class OneTier:
    """All that instances hold is at hand: loading it hides behind the computation."""

    def look(self, request: Request, matched_blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reuse all, in no time."""
        return matched_blocks, np.zeros(len(matched_blocks))
