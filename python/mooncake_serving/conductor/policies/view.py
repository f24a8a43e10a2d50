"""What a policy sees of one request: the instances it may choose from, and what each would take."""

from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster
from ..costs import Costs
from ..decision import Fetch, PrefillChoice
from ..reasons import Reason, Why
from ..request import Request


@dataclass(frozen=True, slots=True)
class PrefillView:
    """One request beside the ``c`` instances that could prefill it.

    Attributes:
        request: to be placed.
        now_s: when it is decided.
        cluster: the state of all instances.
        costs: the cost models.
        candidates: ``[c]``, at least one: the numbers of the instances that may be chosen.
        matched_blocks: ``[num_instances]``, the longest prefix that each instance holds.
        local_tokens: ``[c]``, what each candidate can reuse of its own cache.
        wait_s: ``[c]``, until each candidate could begin.
        rng: of the conductor.
    """

    request: Request
    now_s: float
    cluster: Cluster
    costs: Costs
    candidates: np.ndarray
    matched_blocks: np.ndarray
    local_tokens: np.ndarray
    wait_s: np.ndarray
    rng: np.random.Generator

    @classmethod
    def of(
        cls,
        request: Request,
        now_s: float,
        cluster: Cluster,
        costs: Costs,
        candidates: np.ndarray,
        matched_blocks: np.ndarray,
        rng: np.random.Generator,
    ) -> "PrefillView":
        """Make a view; tokens and waiting times follow from the rest."""
        local = reusable_tokens(request, matched_blocks[candidates])
        wait = cluster.wait_s(candidates, now_s)
        return cls(request, now_s, cluster, costs, candidates, matched_blocks, local, wait, rng)

    def local_prefill_s(self) -> np.ndarray:
        """Predict the prefill on each candidate with its own cache alone: ``[c]`` seconds."""
        return self.costs.prefill.seconds(self.request.num_tokens, self.local_tokens)

    def choose_local(self, position: int, why: Why, **values: float) -> PrefillChoice:
        """Choose ``candidates[position]`` with its own cache alone."""
        local, wait = int(self.local_tokens[position]), float(self.wait_s[position])
        prefill = float(self.costs.prefill.seconds(self.request.num_tokens, local))
        values |= {"ttft_s": wait + prefill, "wait_s": wait, "local_tokens": local}
        return PrefillChoice(
            instance=int(self.candidates[position]),
            local_tokens=local,
            prefix_tokens=local,
            fetch=None,
            wait_s=wait,
            prefill_s=prefill,
            ttft_s=wait + prefill,
            reason=Reason(why, values),
        )

    def make_fetch(self, position: int, source: int, best_blocks: int, seconds: float) -> Fetch:
        """Describe the fetch of what ``candidates[position]`` lacks of ``source``'s prefix."""
        instance = int(self.candidates[position])
        first = int(self.matched_blocks[instance])
        tokens = int(reusable_tokens(self.request, best_blocks)) - int(self.local_tokens[position])
        return Fetch(source, instance, first, best_blocks - first, tokens, seconds)


def reusable_tokens(request: Request, num_blocks: np.ndarray | int) -> np.ndarray:
    """Tell how many of a request's tokens its first blocks hold; the last is always computed."""
    return np.minimum(np.multiply(num_blocks, request.block_size), request.num_tokens - 1)
