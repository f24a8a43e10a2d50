"""How many runs of keys a rule can see: whether every row is sure to fit its canonical form."""

from dataclasses import dataclass

from .rule import Both, Either, Leaf, Op, Rule

MAX_RUNS = 2


@dataclass(frozen=True)
class Bound:
    """What is known of the keys that a rule sees, apart from those of a tree's tail.

    Attributes:
        most: the most runs.
        is_anchored: they include the first key, or there are none.
        is_local: they include the query's own position, or there are none.
    """

    most: int
    is_anchored: bool
    is_local: bool


BOUNDS = {
    Op.CAUSAL: Bound(1, True, True),
    Op.FULL: Bound(1, True, True),
    Op.SLIDING_WINDOW: Bound(1, False, True),
    Op.CHUNKED_LOCAL: Bound(1, False, True),
    Op.SINK: Bound(1, True, False),
    Op.PREFIX_LM: Bound(1, True, True),
    Op.DOCUMENTS: Bound(1, False, True),
    Op.SPANS: Bound(1, False, True),
    Op.ITEMS: Bound(2, False, False),
    Op.TREE: Bound(1, True, False),
}


def always_fits(rule: Rule) -> bool:
    """Return whether no row of the rule can have more runs than a row holds."""
    return bound(rule).most <= MAX_RUNS


def bound(rule: Rule) -> Bound:
    """Return what is known of a rule with no choice by request left in it."""
    if isinstance(rule, Leaf):
        return BOUNDS[rule.op]
    assert isinstance(rule, Both | Either)
    left, right = bound(rule.left), bound(rule.right)
    is_anchored = left.is_anchored and right.is_anchored
    is_local = left.is_local and right.is_local
    # Two sets of a and b runs intersect in at most a + b - 1; a union with a shared key, too.
    merges = isinstance(rule, Both) or is_anchored or is_local
    return Bound(max(left.most + right.most - merges, 1), is_anchored, is_local)
