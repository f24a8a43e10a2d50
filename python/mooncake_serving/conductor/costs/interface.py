"""What the conductor asks of a cost model. All calls take numbers or arrays, and broadcast."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike


class PrefillCost(Protocol):
    """Predicts the seconds that one prefill takes."""

    def seconds(self, num_tokens: ArrayLike, prefix_tokens: ArrayLike) -> np.ndarray:
        """Predict the prefill of a prompt.

        Args:
            num_tokens: of the whole prompt.
            prefix_tokens: of them, those whose KV is there already, in ``[0, num_tokens)``: at
                least one token is computed, for its logits are the first token's.
        """
        ...


class DecodeCost(Protocol):
    """Predicts the seconds of one decoding step, which are the TBT of all requests in it."""

    def seconds(self, batch_size: ArrayLike, kv_tokens: ArrayLike) -> np.ndarray:
        """Predict one step of ``batch_size`` requests that attend to ``kv_tokens`` in all."""
        ...


class TransferCost(Protocol):
    """Predicts the seconds that it takes to fetch KV from another instance."""

    def seconds(
        self, num_tokens: ArrayLike, backlog_s: ArrayLike, num_sending: ArrayLike
    ) -> np.ndarray:
        """Predict a transfer.

        Args:
            num_tokens: whose KV is moved.
            backlog_s: seconds that the source needs for what it has been asked for already.
            num_sending: transfers that this backlog consists of.
        """
        ...


@dataclass(frozen=True, slots=True)
class Costs:
    """The models that a decision needs.

    Attributes:
        prefill: from the beginning of a prefill to its first token, on an instance that is idle.
        decode: of a step.
        transfer: of KV from instance to instance.
        occupancy: from the beginning of a prefill until the next one can begin, which in a
            pipeline is when the first stage is free; None: when the first token is there.
    """

    prefill: PrefillCost
    decode: DecodeCost
    transfer: TransferCost
    occupancy: PrefillCost | None = None
