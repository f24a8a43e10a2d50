"""Describe who attends to whom in a mixed batch, and hand the mask to other libraries."""

import mooncake_kernels as mk

# A step: two decodes and a chunk of a prompt, with a sliding window and four sink tokens.
batch = mk.ChunkBatch(q_lens=[1, 1, 512], kv_lens=[900, 4000, 8704])
rule = (mk.mask.causal() & mk.mask.sliding_window(4096)) | mk.mask.sink(4)

rows = mk.mask.rows(rule, batch)  # a few integers per query, exact, whatever the number of keys
print(f"{batch.num_q} queries, {rows.intervals.nbytes} bytes of intervals")

block_map = rows.block_map(128, 128)  # which tiles are full, partial, empty
packed, indptr = rows.packed()  # FlashInfer's bits
print(f"{packed.numel()} bytes as FlashInfer's bits, requests at {indptr.tolist()}")

# Queries need not be the last ones: here tokens 10 and 700 of a prompt are recomputed.
some = mk.ChunkBatch(q_lens=[2], kv_lens=[1024], positions=[10, 700])
dense = mk.mask.rows(mk.mask.causal(), some).dense()[0]
assert dense.sum(1).tolist() == [11, 701]

# A tree of drafts: each sees the prompt, its ancestors and itself.
tree = mk.mask.rows(mk.mask.tree([-1, 0, 0, 1]), mk.ChunkBatch(q_lens=[4], kv_lens=[20]))
assert tree.dense()[0][3, 16:].tolist() == [True, True, False, True]
