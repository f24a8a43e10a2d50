"""Replication of hot prefixes, ahead of the requests that would fetch them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..cluster import Cluster, Role
from ..costs import TransferCost
from ..errors import check_count, check_positive
from ..index import Index
from ..reasons import Reason, Why
from .heat import Heat


@dataclass(frozen=True, slots=True)
class Replicate:
    """Copy blocks from one instance to another, which has all blocks before them."""

    keys: tuple[int, ...]
    source: int
    target: int
    num_tokens: int
    seconds: float  # predicted, with the source's congestion
    reason: Reason


@dataclass(frozen=True, slots=True)
class ReplicaPolicy:
    """A block is hot while requests for it exceed ``rate_per_holder`` on each of its holders.

    Algorithm 1 copies a hot prefix when a holder is so busy that another instance fetches it. This
    policy does so earlier, and off any request's path (Mooncake's conductor replicates hot blocks;
    the papers leave open when).

    Attributes:
        rate_per_holder: requests per second.
        max_holders: maximum number of copies; a block that has them may get more with a hot one
            behind it, if no one else could take that.
        block_size: tokens in a block.
    """

    rate_per_holder: float
    max_holders: int = 8
    block_size: int = 512

    def __post_init__(self) -> None:
        """Check that all are positive."""
        check_positive("ReplicaPolicy", "rate_per_holder", self.rate_per_holder)
        check_count("ReplicaPolicy", "max_holders", self.max_holders, 1)
        check_count("ReplicaPolicy", "block_size", self.block_size, 1)

    def advise(
        self,
        keys: Sequence[int],
        heat: Heat,
        index: Index,
        cluster: Cluster,
        cost: TransferCost,
        now_s: float,
    ) -> Replicate | None:
        """Choose which part of a chain to copy where, if any.

        Equivalent to::

            hot = the first run of blocks, each of which has 1 to max_holders - 1 holders that are
                  up, and is asked for more than rate_per_holder * holders times a second
            source = of those that hold all up to the end of hot, the one with the least to send
            target = of the others that prefill and hold all before hot, the one with the least to
                     do; if there are none, of the others that prefill
            copy what the target lacks up to the end of hot

        What is before hot has enough holders: a system prompt in front of a document, for example.

        Args:
            keys: a chain from its first block: that of a request just served, for example.
            heat: how often each block is requested.
            index: which instances hold what.
            cluster: the state of all instances.
            cost: of the copy.
            now_s: current time.
        """
        first, end = self._hot_run(keys, heat, index, cluster, now_s)
        if first == end:
            return None
        matched = np.where(cluster.up, index.match(keys[:end]), 0)
        end = int(matched.max())  # blocks may be spread, so that no instance has all
        if end <= first:
            return None
        holders = np.flatnonzero(matched == end)
        prefillers = cluster.of_role(Role.PREFILL)
        others = prefillers[matched[prefillers] < end]
        if len(holders) >= self.max_holders or not len(others):
            return None
        near = others[matched[others] >= first]
        others = near if len(near) else others
        source = int(holders[cluster.backlog_s(holders, now_s).argmin()])
        target = int(others[cluster.wait_s(others, now_s).argmin()])
        missing = tuple(keys[int(matched[target]) : end])
        num_tokens = len(missing) * self.block_size
        backlog_s = cluster.backlog_s(np.array([source]), now_s)[0]
        seconds = float(cost.seconds(num_tokens, backlog_s, cluster.num_sending[source]))
        values = {
            "rate": heat.rate(keys[max(first, int(matched[target]))], now_s),
            "holders": len(holders),
            "limit": self.rate_per_holder,
        }
        return Replicate(missing, source, target, num_tokens, seconds, Reason(Why.HOT, values))

    def _hot_run(
        self, keys: Sequence[int], heat: Heat, index: Index, cluster: Cluster, now_s: float
    ) -> tuple[int, int]:
        """Return where the first run of hot blocks begins and ends; nothing if there is none."""
        first, all_up = len(keys), bool(cluster.up.all())
        for number, key in enumerate(keys):
            holders = index.num_holders(key)
            if holders and not all_up:
                holders = int(np.count_nonzero(cluster.up[index.holders(key)]))
            hot = heat.rate(key, now_s) > self.rate_per_holder * holders
            if hot and 0 < holders < self.max_holders:
                first = min(first, number)
            elif first < number:
                return first, number
            elif not holders:  # what follows is of no use without this block
                return number, number
        return first, len(keys)
