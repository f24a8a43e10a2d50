"""Where instances have the blocks that they hold: what must be loaded, if it is worth that."""

from typing import Protocol

import numpy as np

from .request import Request


class Tiers(Protocol):
    """Knows which part of an instance's cache is in a tier that is slow to read, such as an SSD."""

    def lookup(self, request: Request, matched_blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return what each instance would reuse of a request's prefix, and how long it reads that.

        Args:
            request: to be placed.
            matched_blocks: ``[num_instances]``, the longest prefix that each one holds.

        Returns:
            ``[num_instances]`` blocks, as many or fewer: without those that are computed faster
            than loaded; and ``[num_instances]`` seconds that it takes to load these, in parallel
            with the computation.
        """
        ...


class OneTier:
    """All blocks of an instance are at hand: loading them hides behind the computation."""

    def lookup(self, request: Request, matched_blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Reuse all, in no time."""
        return matched_blocks, np.zeros(len(matched_blocks))
