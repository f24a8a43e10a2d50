"""Mooncake (FAST'25), Figure 5, and arXiv:2407.00079, Figure 8: where to prefill."""

from collections.abc import Sequence
from itertools import pairwise

from mooncake_serving.conductor import (
    KVCacheCentric,
    LoadBalance,
    LocalCacheAware,
    PrefillPolicy,
    Random,
)

from ..options import DisaggregatedOptions
from .clusters import serve
from .outcome import Claim, Outcome, Row, Setup
from .workloads import conversation

POLICIES: dict[str, tuple[PrefillPolicy, float, float]] = {  # mean TTFT: FAST'25, arXiv
    "random": (Random(), 19.65, 92.07),
    "load balance": (LoadBalance(), 5.27, 60.41),
    "local cache-aware": (LocalCacheAware(), 3.58, 14.36),
    "global cache-aware": (KVCacheCentric(), 3.07, 6.26),
}


def fast25(setup: Setup) -> Outcome:
    """FAST'25, Figure 5: mean TTFT under each policy, 8 prefill and 8 decode instances."""
    return _compare(setup, "FAST'25, Figure 5", 0, 14.0, conversation(setup).remarks)


def arxiv(setup: Setup) -> Outcome:
    """arXiv:2407.00079, Figure 8: the same, whose trace of 23,000 requests was another one."""
    remarks = ["the paper's trace of 23,000 requests is another one"]
    return _compare(setup, "arXiv:2407.00079, Figure 8", 1, 56.4, remarks)


def _compare(
    setup: Setup, title: str, paper: int, published_saved: float, remarks: Sequence[str]
) -> Outcome:
    rows, means = [], []
    for name, (policy, *figures) in POLICIES.items():
        published = figures[paper]
        setup.on_step(name, len(POLICIES))
        means.append(float(serve(setup, DisaggregatedOptions(), policy=policy).ttft_s.mean()))
        rows.append(Row(f"{name}: mean TTFT", means[-1], published, "s"))
    saved = 100 * (1 - means[-1] / means[-2])
    rows.append(Row("global over local: less TTFT", saved, published_saved, "%"))
    return Outcome(
        f"{title}: {setup.trace_name}, 8P + 8D",
        rows,
        [
            Claim(
                "random > load balance > local cache-aware > global cache-aware",
                all(a > b for a, b in pairwise(means)),
            )
        ],
        remarks=remarks,
    )
