"""Algorithm 1 of Mooncake's paper: reuse, fetch or recompute, by the time to first token."""

from dataclasses import dataclass, replace

import numpy as np

from ..decision import PrefillChoice
from ..errors import check_at_least, check_flag
from ..reasons import Reason, Why
from .baselines import LocalCacheAware
from .view import PrefillTimes, PrefillView, reusable_tokens


@dataclass(frozen=True, slots=True)
class KVCacheCentric:
    """The instance with the shortest TTFT, which may fetch the best prefix from its holder.

    Equivalent to, with the longest prefix that anyone can send, ``best``, held by ``source``::

        for instance in candidates:
            if best > balancing_threshold * local[instance]:    # much more is held elsewhere
                fetch = transfer(best - local[instance], congestion of source)
                ttft = fetch + wait[instance] + prefill(num_tokens, best)
            if not best > ... or recompute_if_cheaper and the line below is less:
                ttft = wait[instance] + prefill(num_tokens, local[instance])
        choose the least ttft

    (Mooncake, FAST'25, algorithm 1; arXiv 2407.00079, sections 6.1 and 6.2.) A fetched block stays
    where it was and is kept where it went. So the blocks of an overloaded holder, hot spots, spread
    to others, without a prediction of which will be hot. What is reserved and not computed yet
    cannot be fetched; the instance that computes it can reuse it, for requests that are behind.

    Among instances that hold ``best``, the source is the one with the least to send, and to read
    from a slow tier. A fetch takes as long as the slowest of its NIC, that read, and what the
    fetching instance reads from its own slow tier meanwhile.

    Attributes:
        balancing_threshold: ``kvcache_balancing_threshold``: at least 1. The paper sets it by hand
            and does not give its value.
        recompute_if_cheaper: compute what is missing if that is faster than fetching it, as section
            6.2 (arXiv) has it; False for the algorithm as printed.
        overlap_fetch: fetch while the request waits, ``max(fetch, wait)``; the printed algorithm
            adds them up.
    """

    balancing_threshold: float = 2.0
    recompute_if_cheaper: bool = True
    overlap_fetch: bool = False

    def __post_init__(self) -> None:
        """Check the threshold and the flags."""
        check_at_least("KVCacheCentric", "balancing_threshold", self.balancing_threshold, 1)
        for name in ("recompute_if_cheaper", "overlap_fetch"):
            check_flag("KVCacheCentric", name, getattr(self, name))

    def choose(self, view: PrefillView) -> PrefillChoice:
        """Choose one of ``view.candidates``."""
        best_blocks, source = _best_holder(view)
        best = int(reusable_tokens(view.request, best_blocks))
        much_better = best > self.balancing_threshold * view.local_tokens
        if not much_better.any():
            choice = LocalCacheAware().choose(view)
            if best > choice.local_tokens:
                choice = self._with_why(choice, Why.RECOMPUTE_BALANCED, best)
            return choice

        lacking = np.maximum(best - view.local_tokens, 0)
        sent_s = view.costs.transfer.seconds(
            lacking,
            view.cluster.backlog_s(np.array([source]), view.now_s),
            view.cluster.num_sending[source],
        )
        read_s = np.maximum(view.load_s[source] * (lacking / best), view.load_s[view.candidates])
        fetch_s = np.maximum(sent_s, read_s)
        times = view.predict(best)
        begin_s = np.maximum(fetch_s, view.wait_s) if self.overlap_fetch else fetch_s + view.wait_s
        fetched_ttft_s, local_ttft_s = view.ttft_s(begin_s, times), view.local_ttft_s()
        fetches = much_better
        if self.recompute_if_cheaper:
            fetches = much_better & (fetched_ttft_s < local_ttft_s)
        ttft_s = np.where(fetches, fetched_ttft_s, local_ttft_s)
        position = int(ttft_s.argmin())

        if fetches[position]:
            return self._fetching(
                view,
                position,
                source,
                best_blocks,
                float(fetch_s[position]),
                times,
                float(ttft_s[position]),
            )
        choice = view.choose_local(position, Why.LOCAL_CACHE)
        if much_better[position]:
            cost = float(fetch_s[position])
            return self._with_why(choice, Why.RECOMPUTE_CHEAPER, best, fetch_s=cost)
        if best > choice.local_tokens:
            return self._with_why(choice, Why.RECOMPUTE_BALANCED, best)
        return choice

    @staticmethod
    def _fetching(
        view: PrefillView,
        position: int,
        source: int,
        best_blocks: int,
        fetch_s: float,
        times: PrefillTimes,
        ttft_s: float,
    ) -> PrefillChoice:
        fetch = view.make_fetch(position, source, best_blocks, fetch_s)
        local = int(view.local_tokens[position])
        values = {
            "ttft_s": ttft_s,
            "fetched_tokens": fetch.num_tokens,
            "source": source,
            "fetch_s": fetch_s,
            "local_tokens": local,
        }
        return PrefillChoice(
            instance=fetch.target,
            local_tokens=local,
            prefix_tokens=local + fetch.num_tokens,
            fetch=fetch,
            wait_s=float(view.wait_s[position]),
            prefill_s=float(times.prefill_s),
            occupied_s=float(times.occupied_s),
            ttft_s=ttft_s,
            reason=Reason(Why.FETCH, values),
        )

    @staticmethod
    def _with_why(choice: PrefillChoice, why: Why, best: int, **values: float) -> PrefillChoice:
        known = {**choice.reason.values, "best_tokens": best, **values}
        return replace(choice, reason=Reason(why, known))


def _best_holder(view: PrefillView) -> tuple[int, int]:
    """Return the longest prefix to be had in blocks, and which of its holders can send it first."""
    sendable = np.where(view.cluster.up, view.sendable_blocks, 0)
    best = int(sendable.max())
    holders = np.flatnonzero(sendable == best)
    busy_s = view.cluster.backlog_s(holders, view.now_s) + view.load_s[holders]
    return best, int(holders[busy_s.argmin()])
