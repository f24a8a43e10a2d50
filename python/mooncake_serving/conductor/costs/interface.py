"""The interface of a cost model. All calls take numbers or arrays, and broadcast."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from ..errors import check_has


class PrefillCost(Protocol):
    """Predicts the seconds that one prefill takes."""

    def seconds(self, num_tokens: ArrayLike, prefix_tokens: ArrayLike) -> np.ndarray:
        """Predict the prefill of a prompt.

        Args:
            num_tokens: of the whole prompt.
            prefix_tokens: those of them whose KV is cached, in ``[0, num_tokens)``: at least one
                token is computed, since its logits give the first output token.
        """
        ...


class DecodeCost(Protocol):
    """Predicts the seconds of one decoding step, which are the TBT of all requests in it."""

    def seconds(self, batch_size: ArrayLike, kv_tokens: ArrayLike) -> np.ndarray:
        """Predict one step of ``batch_size`` requests that attend to ``kv_tokens`` in total."""
        ...


class TransferCost(Protocol):
    """Predicts the seconds that it takes to fetch KV from another instance."""

    def seconds(
        self, num_tokens: ArrayLike, backlog_s: ArrayLike, num_sending: ArrayLike
    ) -> np.ndarray:
        """Predict a transfer.

        Args:
            num_tokens: whose KV is moved.
            backlog_s: seconds that the source needs for earlier requests.
            num_sending: transfers in this backlog.
        """
        ...


@dataclass(frozen=True, slots=True)
class Costs:
    """The models that a decision needs.

    Attributes:
        prefill: from the start of a prefill to its first token, on an idle instance.
        decode: of a step.
        transfer: of KV from instance to instance.
        occupancy: from the start of a prefill until the next one can start, which in a pipeline is
            when the first stage is free; None: when the first token is there.

    Raises:
        InvalidArgument: one of them cannot answer in ``seconds``.
    """

    prefill: PrefillCost
    decode: DecodeCost
    transfer: TransferCost
    occupancy: PrefillCost | None = None

    def __post_init__(self) -> None:
        """Check that all can be asked."""
        for name in ("prefill", "decode", "transfer"):
            check_has("Costs", name, getattr(self, name), "seconds", f"a {name.title()}Cost")
        if self.occupancy is not None:
            check_has("Costs", "occupancy", self.occupancy, "seconds", "a PrefillCost or None")
