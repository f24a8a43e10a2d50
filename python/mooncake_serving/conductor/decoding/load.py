"""What all instances decode, at one moment."""

from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What each of ``n`` instances decodes at one moment, and what it has promised beside that.

    Attributes:
        batch_size: ``[n]`` requests that it decodes.
        kv_tokens: ``[n]`` tokens whose KV they hold.
        reserved_requests: ``[n]`` requests that will come.
        reserved_tokens: ``[n]`` tokens kept for them, and for what is still to be generated.
    """

    batch_size: np.ndarray
    kv_tokens: np.ndarray
    reserved_requests: np.ndarray
    reserved_tokens: np.ndarray

    @classmethod
    def now(cls, cluster: Cluster) -> "DecodeLoad":
        """Return what is decoded now."""
        return cls(
            cluster.batch_size,
            cluster.kv_tokens,
            cluster.reserved_requests,
            cluster.reserved_tokens,
        )

    def without_reserved(self, coming_tokens: np.ndarray) -> "DecodeLoad":
        """Leave out requests that will come: one that is prefilled goes before them.

        Without this, many that are reserved for keep out each one whose prefill is over, and when
        their turn comes they are kept out in the same way.

        Args:
            coming_tokens: ``[n]``, of ``reserved_tokens``, those of ``reserved_requests``.
        """
        return DecodeLoad(
            self.batch_size,
            self.kv_tokens,
            np.zeros_like(self.reserved_requests),
            self.reserved_tokens - coming_tokens,
        )
