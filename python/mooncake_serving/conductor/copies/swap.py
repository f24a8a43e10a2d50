"""Which blocks are evicted from a full cache, and whether they are demoted or dropped."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from ..cluster import Cluster
from ..costs import Costs
from ..errors import InvalidArgument, check_count, shown
from ..index import Index
from ..reasons import Reason, Why
from .heat import Heat


class SwapAction(Enum):
    """What happens to an evicted block."""

    DROP = "drop"
    DEMOTE = "demote"


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """A block of an instance's cache that is not in use at the moment.

    Attributes:
        key: its name.
        parent: the key of the block before it; None for the first one of a chain.
        prefix_tokens: tokens before it.
        num_tokens: its own.
    """

    key: int
    parent: int | None
    prefix_tokens: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Swap:
    """One block to evict, and why."""

    key: int
    action: SwapAction
    reason: Reason


def choose_swaps(
    blocks: Sequence[CachedBlock],
    num_needed: int,
    instance: int,
    *,
    heat: Heat,
    index: Index,
    cluster: Cluster,
    costs: Costs,
    now_s: float,
    load_s: float | None = None,
) -> list[Swap]:
    """Choose the blocks that are least worth keeping, and whether each is demoted or dropped.

    Equivalent to::

        for block in blocks:
            recompute_s = prefill(its tokens after its prefix)
            fetch_s     = transfer(its tokens), if another that is up holds it and what is before it
            value       = rate of requests for it * the least of recompute_s, fetch_s and load_s
            value       = at least that of any block that follows it, which is of no use alone
        take num_needed of the least value; of a chain the last ones first
        drop what another holds, or is recomputed faster than it is loaded; demote the others

    Args:
        blocks: that may be evicted. What is before a block is known as far as its ``parent``, the
            parent of that if it is among them, and so on.
        num_needed: how many must be; fewer are returned if there are fewer.
        instance: whose cache it is.
        heat: how often each block is requested.
        index: which other instances hold what.
        cluster: which of them are up.
        costs: of recomputing and fetching.
        now_s: current time.
        load_s: seconds to load one block from the slower tier; None if there is none.

    Returns:
        The blocks to evict, in order.

    Raises:
        InvalidArgument: ``num_needed`` or ``load_s`` is negative.
    """
    check_count("choose_swaps", "num_needed", num_needed, 0)
    if load_s is not None and not load_s >= 0:
        raise InvalidArgument(f"choose_swaps: load_s must be at least 0, got {shown(load_s)}")
    holders = _other_holders(blocks, instance, index, cluster)
    values: dict[int, float] = {}
    swaps: dict[int, Swap] = {}
    for block in sorted(blocks, key=lambda block: -block.prefix_tokens):
        rate = heat.rate(block.key, now_s)
        last = block.prefix_tokens + block.num_tokens
        # The cost that one more block adds to a prefill: the pass itself takes place in any case.
        recompute_s = float(
            costs.prefill.seconds(last + 1, block.prefix_tokens)
            - costs.prefill.seconds(last + 1, last)
        )
        others = len(holders[block.key])
        ways = [recompute_s] if load_s is None else [recompute_s, load_s]
        if others:
            ways.append(float(costs.transfer.seconds(block.num_tokens, 0.0, 0)))
        value = max(rate * min(ways), values.get(block.key, 0.0))
        values[block.key] = value
        if block.parent is not None:
            values[block.parent] = max(values.get(block.parent, 0.0), value)
        swaps[block.key] = _swap(block.key, rate, others, recompute_s, load_s)
    order = sorted(blocks, key=lambda block: (values[block.key], -block.prefix_tokens, block.key))
    return [swaps[block.key] for block in order[:num_needed]]


def _other_holders(
    blocks: Sequence[CachedBlock], instance: int, index: Index, cluster: Cluster
) -> dict[int, set[int]]:
    """Return who else can use each block: a block whose chain is broken before it is of no use."""
    holders: dict[int, set[int]] = {}

    def others(key: int) -> set[int]:
        if key not in holders:
            holders[key] = {i for i in index.holders(key) if i != instance and cluster.up[i]}
        return holders[key]

    for block in sorted(blocks, key=lambda block: block.prefix_tokens):
        usable = others(block.key)
        holders[block.key] = usable & others(block.parent) if block.parent is not None else usable
    return holders


def _swap(key: int, rate: float, others: int, recompute_s: float, load_s: float | None) -> Swap:
    if others:
        reason = Reason(Why.HELD_ELSEWHERE, {"rate": rate, "holders": others})
        return Swap(key, SwapAction.DROP, reason)
    if load_s is None or recompute_s <= load_s:
        return Swap(
            key, SwapAction.DROP, Reason(Why.COLD, {"rate": rate, "recompute_s": recompute_s})
        )
    reason = Reason(Why.WORTH_KEEPING, {"load_s": load_s, "recompute_s": recompute_s})
    return Swap(key, SwapAction.DEMOTE, reason)
