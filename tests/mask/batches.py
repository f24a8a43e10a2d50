"""Random batches and rules."""

from hypothesis import strategies as st

import mooncake_kernels as mk

rule = mk.mask


@st.composite
def batches(draw: st.DrawFn, max_requests: int = 4, max_kv: int = 40) -> mk.ChunkBatch:
    """Ragged lengths, 0 and 1 among them, with and without explicit positions."""
    kv_lens = draw(st.lists(st.integers(0, max_kv), min_size=0, max_size=max_requests))
    q_lens = [draw(st.integers(0, kv_len)) for kv_len in kv_lens]
    positions = None
    if draw(st.booleans()):
        positions = [
            draw(st.integers(0, kv_len - 1))
            for q_len, kv_len in zip(q_lens, kv_lens, strict=True)
            for _ in range(q_len)
        ]
    return mk.ChunkBatch(q_lens, kv_lens, positions)


@st.composite
def rules(draw: st.DrawFn, batch: mk.ChunkBatch, depth: int = 3) -> mk.mask.Rule:
    """Any rule: leaves, joined by & and |, one for all requests or one for each."""
    kind = draw(st.integers(0, 3)) if depth else 0
    if kind == 1:
        return draw(rules(batch, depth - 1)) & draw(rules(batch, depth - 1))
    if kind == 2:
        return draw(rules(batch, depth - 1)) | draw(rules(batch, depth - 1))
    if kind == 3:
        requests = range(batch.num_requests)
        return rule.per_request([draw(rules(batch, depth - 1)) for _ in requests])
    return draw(leaves(batch))


@st.composite
def leaves(draw: st.DrawFn, batch: mk.ChunkBatch) -> mk.mask.Rule:
    """One rule, with parameters for all requests or for each."""
    shared = draw(st.booleans()) or batch.num_requests == 0

    def each(values: st.SearchStrategy):
        return draw(values) if shared else [draw(values) for _ in range(batch.num_requests)]

    number = st.integers(0, 45)
    ascending = st.lists(number, max_size=6, unique=True).map(sorted)
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return rule.causal()
    if kind == 1:
        return rule.full()
    if kind == 2:
        return rule.sliding_window(each(st.integers(1, 45)))
    if kind == 3:
        return rule.chunked_local(each(st.integers(1, 45)))
    if kind == 4:
        return rule.sink(each(number))
    if kind == 5:
        return rule.prefix_lm(each(number))
    if kind == 6:
        return rule.documents(each(ascending.map(lambda cuts: [0, *(c for c in cuts if c)])))
    if kind == 7:
        pairs = ascending.map(lambda ends: [*zip(ends[::2], ends[1::2], strict=False)])
        return rule.spans(each(pairs))
    if kind == 8:
        prefix = draw(st.integers(0, 20))
        return rule.items(
            prefix, each(ascending.map(lambda cuts: [c for c in cuts if c >= prefix]))
        )
    return rule.tree(draw_trees(draw, batch))


def draw_trees(draw: st.DrawFn, batch: mk.ChunkBatch) -> list[list[int]]:
    """A tree for each request, its drafts in any order."""
    trees = []
    for kv_len in batch.kv_lens_list:
        num_drafts = draw(st.integers(0, min(kv_len, 64)))
        order = draw(st.permutations(range(num_drafts)))
        parents = [-1] * num_drafts
        for rank in range(1, num_drafts):
            above = draw(st.integers(-1, rank - 1))
            parents[order[rank]] = -1 if above < 0 else order[above]
        trees.append(parents)
    return trees
