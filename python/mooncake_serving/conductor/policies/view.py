"""A policy's view of one request: the instances it may choose from, and the predicted times."""

from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster
from ..costs import Costs
from ..decision import Fetch, PrefillChoice
from ..reasons import Reason, Why
from ..request import Request


@dataclass(frozen=True, slots=True)
class PrefillView:
    """One request, and the ``c`` instances that could prefill it.

    Attributes:
        request: to be placed.
        now_s: time of the decision.
        cluster: the state of all instances.
        costs: the cost models.
        candidates: ``[c]``, at least one: the numbers of the instances that may be chosen.
        matched_blocks: ``[num_instances]``, the longest prefix that each instance holds, or will
            hold once it has computed what is reserved, before this request's turn.
        sendable_blocks: ``[num_instances]``, what it holds of that already, for others to fetch.
        local_tokens: ``[c]``, what each candidate can reuse from its own cache.
        wait_s: ``[c]``, until each candidate could begin.
        drain_s: ``[c]``, from then on, until the requests before are out of its later stages.
        load_s: ``[num_instances]``, how long each reads what it holds from a slow tier.
        rng: of the conductor.
    """

    request: Request
    now_s: float
    cluster: Cluster
    costs: Costs
    candidates: np.ndarray
    matched_blocks: np.ndarray
    sendable_blocks: np.ndarray
    local_tokens: np.ndarray
    wait_s: np.ndarray
    drain_s: np.ndarray
    load_s: np.ndarray
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
        sendable_blocks: np.ndarray,
        load_s: np.ndarray,
        rng: np.random.Generator,
    ) -> "PrefillView":
        """Make a view; tokens and waiting times are derived from the rest."""
        local = reusable_tokens(request, matched_blocks[candidates])
        wait = cluster.wait_s(candidates, now_s)
        drain = cluster.drain_left_s(candidates, now_s)
        return cls(
            request,
            now_s,
            cluster,
            costs,
            candidates,
            matched_blocks,
            sendable_blocks,
            local,
            wait,
            drain,
            load_s,
            rng,
        )

    def predict(
        self, prefix_tokens: np.ndarray | int, load_s: np.ndarray | float = 0.0
    ) -> "PrefillTimes":
        """Predict the prefill with a prefix that is loaded in parallel in ``load_s``."""
        num_tokens = self.request.num_tokens
        prefill = np.maximum(self.costs.prefill.seconds(num_tokens, prefix_tokens), load_s)
        if self.costs.occupancy is None:
            return PrefillTimes(prefill, prefill)
        occupied = self.costs.occupancy.seconds(num_tokens, prefix_tokens)
        return PrefillTimes(prefill, np.maximum(occupied, load_s))

    def ttft_s(self, begin_s: np.ndarray, times: "PrefillTimes") -> np.ndarray:
        """Predict the first token of a prefill that begins in ``begin_s``: ``[c]`` seconds."""
        behind_others_s = self.wait_s + self.drain_s + times.occupied_s
        return np.maximum(begin_s + times.prefill_s, behind_others_s)

    def local_times(self) -> "PrefillTimes":
        """Predict the prefill on each candidate with only its own cache: ``[c]`` seconds each."""
        return self.predict(self.local_tokens, self.load_s[self.candidates])

    def local_ttft_s(self) -> np.ndarray:
        """Predict the first token on each candidate with only its own cache: ``[c]`` seconds."""
        return self.ttft_s(self.wait_s, self.local_times())

    def choose_local(self, position: int, why: Why, **values: float) -> PrefillChoice:
        """Choose ``candidates[position]`` with only its own cache."""
        local, wait = int(self.local_tokens[position]), float(self.wait_s[position])
        times = self.local_times()
        ttft = float(self.ttft_s(self.wait_s, times)[position])
        values |= {"ttft_s": ttft, "wait_s": wait, "local_tokens": local}
        return PrefillChoice(
            instance=int(self.candidates[position]),
            local_tokens=local,
            prefix_tokens=local,
            fetch=None,
            wait_s=wait,
            prefill_s=float(times.prefill_s[position]),
            occupied_s=float(times.occupied_s[position]),
            ttft_s=ttft,
            reason=Reason(why, values),
        )

    def make_fetch(self, position: int, source: int, best_blocks: int, seconds: float) -> Fetch:
        """Describe the fetch of what ``candidates[position]`` lacks of ``source``'s prefix."""
        instance = int(self.candidates[position])
        first = int(self.matched_blocks[instance])
        tokens = int(reusable_tokens(self.request, best_blocks)) - int(self.local_tokens[position])
        return Fetch(source, instance, first, best_blocks - first, tokens, seconds)


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Times of a prefill on an idle instance, by its prefix: ``[c]`` seconds, or one number.

    Attributes:
        prefill_s: from its start to the first token.
        occupied_s: from its start until the next one can begin.
    """

    prefill_s: np.ndarray
    occupied_s: np.ndarray


def reusable_tokens(request: Request, num_blocks: np.ndarray | int) -> np.ndarray:
    """Return how many of a request's tokens its first blocks hold; the last is always computed."""
    return np.minimum(np.multiply(num_blocks, request.block_size), request.num_tokens - 1)
