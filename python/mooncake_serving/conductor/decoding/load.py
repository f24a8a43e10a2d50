"""The decode load of all instances at one time."""

from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster


@dataclass(frozen=True, slots=True)
class DecodeLoad:
    """What each of ``n`` instances decodes at one time, and what it has reserved in addition.

    Attributes:
        batch_size: ``[n]`` requests that it decodes.
        kv_tokens: ``[n]`` tokens whose KV they hold.
        reserved_requests: ``[n]`` requests that will come.
        reserved_tokens: ``[n]`` tokens reserved for them, and for what is still to be generated.
    """

    batch_size: np.ndarray
    kv_tokens: np.ndarray
    reserved_requests: np.ndarray
    reserved_tokens: np.ndarray

    @classmethod
    def now(cls, cluster: Cluster) -> "DecodeLoad":
        """Return the current load."""
        return cls(
            cluster.batch_size,
            cluster.kv_tokens,
            cluster.reserved_requests,
            cluster.reserved_tokens,
        )

    def without_reserved(self, coming_tokens: np.ndarray) -> "DecodeLoad":
        """Leave out requests that will come: a prefilled request has precedence over them.

        Otherwise many reservations would keep out each request whose prefill is over, and would be
        kept out in the same way when their turn comes.

        Args:
            coming_tokens: ``[n]``, the part of ``reserved_tokens`` that belongs to
                ``reserved_requests``.
        """
        return DecodeLoad(
            self.batch_size,
            self.kv_tokens,
            np.zeros_like(self.reserved_requests),
            self.reserved_tokens - coming_tokens,
        )
