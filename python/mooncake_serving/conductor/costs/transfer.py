"""The cost of fetching KV over a shared NIC."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ..errors import check_at_least, check_positive


@dataclass(frozen=True, slots=True)
class NicTransfer:
    """A transfer that shares its source's bandwidth fairly with those in flight.

    Alone it takes ``own = num_tokens * bytes_per_token / bytes_per_s``. Among others, each of which
    gets the same share, it also waits for what they send until it is done, which is at most their
    whole backlog, and at most its own size for each::

        seconds = latency_s + own + min(backlog_s, num_sending * own)

    It is exact if the others have the same size, or are all longer or all shorter; otherwise it is
    an upper bound. Later requests to the source are unknown.

    Attributes:
        bytes_per_token: of KV.
        bytes_per_s: of the source's NICs together.
        latency_s: of a transfer, whatever its size.
    """

    bytes_per_token: float
    bytes_per_s: float
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        """Check that all values are valid."""
        check_positive("NicTransfer", "bytes_per_token", self.bytes_per_token)
        check_positive("NicTransfer", "bytes_per_s", self.bytes_per_s)
        check_at_least("NicTransfer", "latency_s", self.latency_s, 0)

    def seconds(
        self, num_tokens: ArrayLike, backlog_s: ArrayLike, num_sending: ArrayLike
    ) -> np.ndarray:
        """Predict a transfer; see :class:`~.interface.TransferCost`. Zero tokens take no time."""
        own = np.asarray(num_tokens, float) * (self.bytes_per_token / self.bytes_per_s)
        shared = np.minimum(backlog_s, np.asarray(num_sending, float) * own)
        return np.where(own > 0, self.latency_s + own + shared, 0.0)
