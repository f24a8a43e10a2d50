"""Masks to convert: of rules in mixed batches, and random ones that rows can hold."""

import torch
from hypothesis import strategies as st

import mooncake_kernels as mk

mask = mk.mask

MIXED = mk.ChunkBatch([1, 5, 0, 9, 16], [7, 20, 3, 9, 40])  # a decode, extends, nothing, prefills
SELECTED = mk.ChunkBatch([3, 2], [12, 9], positions=[0, 4, 11, 8, 3])

RULES = {
    "full": mask.full(),
    "causal": mask.causal(),
    "window": mask.causal() & mask.sliding_window(4),
    "window_and_sink": (mask.causal() & mask.sliding_window(4)) | mask.sink(2),
    "chunked_local": mask.causal() & mask.chunked_local(8),
    "prefix_lm": mask.prefix_lm(6),
    "documents": mask.causal() & mask.documents([0, 3, 8]),
    "spans": mask.causal() | mask.spans([(2, 6), (8, 11)]),
    "both_ways": mask.documents([0, 3, 8]),
    "window_ahead": mask.sliding_window(4),
}
TREE = mk.ChunkBatch([6, 4], [20, 9])
PARENTS = [[-1, -1, 0, 2, 1, 3], [-1, 0, -1, 2]]

EXAMPLES = {name: mask.rows(rule, MIXED) for name, rule in RULES.items()}
EXAMPLES["selected"] = mask.rows(mask.causal(), SELECTED)
EXAMPLES["tree"] = mask.rows(mask.tree(PARENTS), TREE)
EXAMPLES["empty"] = mask.rows(mask.causal(), mk.ChunkBatch([], []))


@st.composite
def dense_masks(draw: st.DrawFn) -> list[torch.Tensor]:
    """Masks of two runs a query, some requests with bits within 64 keys after them."""
    masks = []
    for _ in range(draw(st.integers(0, 3))):
        kv_len = draw(st.integers(1, 90))
        one = torch.zeros(draw(st.integers(0, min(kv_len, 12))), kv_len, dtype=torch.bool)
        tail_base = draw(st.integers(0, kv_len)) if draw(st.booleans()) else None
        for row in one:
            edges = sorted(draw(st.lists(st.integers(0, kv_len), min_size=4, max_size=4)))
            row[edges[0] : edges[1]] = row[edges[2] : edges[3]] = True
            if tail_base is not None:
                row[tail_base:] = False
                bits = draw(st.integers(0, 2**64 - 1))
                for key in range(tail_base, min(kv_len, tail_base + 64)):
                    row[key] = bits >> (key - tail_base) & 1
        masks.append(one)
    return masks


def equal(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal."""
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    """Attend in float64, one head: q [q_len, dim], k and v [kv_len, dim]; 0 where none is seen."""
    scores = q.double() @ k.double().T / q.shape[1] ** 0.5
    return scores.masked_fill(~seen, -torch.inf).softmax(1).nan_to_num(0.0) @ v.double()
